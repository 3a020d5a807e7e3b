"""How long a GPU takes for the parts of a compiled program: a roofline by fusion.

- a fusion with matmuls: its FLOPs at `MATMUL_RATE` of the peak, which is twice as high in FP8 and half as high in
  float32 (TF32), or its traffic if that takes longer;
- cuDNN's attention: the FLOPs that its mask does not hide, at the rate of its head size;
- anything else: its traffic at `MEMORY_RATE` of the memory's bandwidth;
- a collective over NVLink: what each GPU receives, at `NVLINK_RATE` of the bandwidth.

A kernel takes at least `LEAST_SECONDS`. The rates are fitted to the steps and traces that were measured on an H200
(`benchmarks/results/gpu_h200.json`); those of NVLink are NCCL's usual ones, and not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paxcli.programs.attribution import is_attention
from paxcli.programs.collectives import HOST, KINDS, Collective
from paxcli.programs.gpus import Gpu
from paxcli.programs.hlo import Instruction, Program
from paxcli.programs.prediction import Carrier, Computation, Prediction, matmul_computation, simulate
from paxcli.programs.roofline import CUBLAS, hbm_bytes, matmul_flops

MATMUL_RATE = 0.735
MEMORY_RATE = 0.66
NVLINK_RATE = 0.8
LEAST_SECONDS = 2e-6

# Share of the peak that cuDNN's attention reaches, forward and backward, by the size of heads up to the given one.
ATTENTION_RATES = {64: (0.32, 0.25), 256: (0.48, 0.38)}
PCIE = 50e9  # bytes per second, in one direction
_ATTENTION = "__cudnn$fmha"
_NO_KERNELS = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"})


def predict(program: Program, gpu: Gpu, num_gpus: int, peak_flops: float) -> Prediction:
    """Predicts one step.

    Args:
      program: Compiled for GPUs of one machine.
      gpu: Their model.
      num_gpus: Their number.
      peak_flops: FLOP/s of one, in bfloat16.
    """
    return simulate(program, _Gpus(gpu, num_gpus, peak_flops))


class _Gpus:
    """The `Machine` of GPUs that are connected by NVLink."""

    def __init__(self, gpu: Gpu, num_gpus: int, peak_flops: float):
        self._gpu, self._num_gpus, self._peak_flops = gpu, num_gpus, peak_flops

    def compute(self, program: Program, instruction: Instruction, operands: Sequence[Instruction]) -> Computation:
        is_transfer = instruction.opcode.removesuffix("-start") in KINDS  # its seconds are those of `transfer`
        if is_transfer or instruction.opcode in _NO_KERNELS or instruction.opcode.endswith("-done"):
            return Computation("other", "hbm", instruction.operation, 0.0)
        if instruction.call_target.startswith(_ATTENTION):
            flops, rate = attention_flops(instruction)
            return Computation("kernels", "kernel", "cudnn", flops / (rate * self._peak_flops), is_kernel=True)
        if instruction.opcode == "custom-call" and not instruction.call_target.startswith(CUBLAS):
            return Computation("kernels", "kernel", instruction.call_target, None, is_kernel=True)
        bandwidth = MEMORY_RATE * self._gpu.hbm
        if instruction.fused:
            if instruction.opcode == "fusion-start":  # its result includes its operands
                result = program.computations[instruction.fused][-1].result
                instruction = dataclasses.replace(instruction, result=result)
            traffic = hbm_bytes(program, instruction, operands)
        else:
            traffic = sum(instruction.hbm_bytes) + sum(sum(operand.hbm_bytes) for operand in operands)
        if flops := matmul_flops(program, instruction, self._gpu.fp8_speed, operands):
            in_float32 = all(dtype == "f32" for operand in operands for dtype, _ in operand.arrays)
            in_cores = max(LEAST_SECONDS, (2 if in_float32 else 1) * flops / (MATMUL_RATE * self._peak_flops))
            return matmul_computation(instruction, in_cores, traffic / bandwidth)
        part = "attention" if is_attention(instruction.op_name) else "other"
        return Computation(part, "hbm", instruction.operation, max(LEAST_SECONDS, traffic / bandwidth))

    def transfer(self, transfer: Collective) -> tuple[Carrier, float]:
        if transfer.kind == HOST:
            return "host", transfer.full_bytes / PCIE
        members = self._num_gpus if transfer.group is None else len(transfer.group)
        return "nvlink", transfer.received_bytes(members) / (NVLINK_RATE * self._gpu.nvlink)


def attention_flops(kernel: Instruction) -> tuple[float, float]:
    """FLOPs of a call of cuDNN's attention, without what a causal mask hides, and the share of the peak it reaches."""
    queries, keys = (shape for _, shape in kernel.operand_arrays[:2])  # [B, T, N, H] and [B, S, K, H]
    is_backward = "Backward" in kernel.call_target
    flops = (5 if is_backward else 2) * 2.0 * math.prod(queries) * keys[1]
    window = int(kernel.attribute(r'"sliding_window_length": ?(\d+)') or 0)
    if window:
        flops *= min(1.0, window / keys[1])
    elif "CAUSAL" in kernel.attribute(r'"mask_type": ?"(\w+)"'):
        flops /= 2
    rates = next(rates for size, rates in ATTENTION_RATES.items() if queries[-1] <= size)
    return flops, rates[is_backward]
