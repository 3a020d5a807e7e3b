"""How long TPUs take for the parts of a compiled program.

On a chip of `chips.py`:

- a fusion with matmuls: its FLOPs at the chip's matmul rate, in FP8 times `fp8_speed`, or its traffic at the bandwidth
  of HBM, if that is longer;
- any other fusion: the clock cycles that the TPU compiler estimates;
- a custom kernel, of attention or a grouped matmul: its FLOPs at `KERNEL_RATE` of the peak;
- a collective over ICI: `V / (bandwidth × links)`. V is what each of n devices receives. For a full array of S bytes,
  that is S (n − 1) / n in an all-gather or reduce-scatter, twice that in an all-reduce, S in a permute. A group
  receives over two links for each ring that it fills, and over one for each open row of chips;
- a collective between slices: `V / (a device's share of its host's DCN bandwidth)`;
- a transfer between device and host memory: its bytes over the bandwidth of PCIe.

Copies inside a chip are assumed to be free. Each doubling of the number of slices adds `SLICE_WAIT` of the step, in
which the slices wait for the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paxcli.programs.attribution import PALLAS_TARGET, is_attention
from paxcli.programs.chips import CHIPS
from paxcli.programs.collectives import HOST, Collective, Interconnect
from paxcli.programs.hlo import Instruction, Program
from paxcli.programs.prediction import Carrier, Computation, Cost, Prediction, matmul_computation, simulate
from paxcli.programs.roofline import hbm_bytes, matmul_flops

# Share of the peak at which a kernel multiplies the blocks that it does not skip.
KERNEL_RATE = 0.5

# In MaxText's published steps of one model on 1 to 32 slices, a doubling costs between 1 and 5 %.
SLICE_WAIT = 0.02

_SPLASH_MATMULS = {"fwd": 2, "dkv": 4, "dq": 3}  # of each kernel of splash attention; T × T × H multiply-adds a head


def predict(program: Program, interconnect: Interconnect, peak_flops: float) -> Prediction:
    """Predicts one step.

    Args:
      program: Compiled for TPUs.
      interconnect: Of its devices.
      peak_flops: FLOP/s of one device.
    """
    prediction = simulate(program, _Tpus(interconnect, peak_flops))
    wait = prediction.seconds * SLICE_WAIT * math.log2(interconnect.num_slices)
    prediction.spend("exposed_dcn", Cost("dcn", "", "waiting for the slowest slice"), wait)
    return prediction


class _Tpus:
    """The `Machine` of an interconnect."""

    def __init__(self, interconnect: Interconnect, peak_flops: float):
        self._interconnect, self._peak_flops = interconnect, peak_flops
        self._chip = CHIPS[interconnect.generation]

    def compute(self, program: Program, instruction: Instruction, operands: Sequence[Instruction]) -> Computation:
        if instruction.opcode == "custom-call" and instruction.call_target == PALLAS_TARGET:
            what, flops = kernel_flops(instruction)
            seconds = None if flops is None else flops / (KERNEL_RATE * self._peak_flops)
            return Computation("kernels", "kernel", what, seconds, is_kernel=True)
        if flops := matmul_flops(program, instruction, self._chip.fp8_speed):
            in_mxu = flops / (self._chip.matmul_rate * self._peak_flops)
            in_hbm = hbm_bytes(program, instruction, operands) / self._chip.hbm
            return matmul_computation(instruction, in_mxu, in_hbm)
        part = "attention" if is_attention(instruction.op_name) else "other"
        cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
        return Computation(part, "hbm", instruction.operation, cycles / self._chip.clock)

    def transfer(self, transfer: Collective) -> tuple[Carrier, float]:
        if transfer.kind == HOST:
            return "host", transfer.full_bytes / self._chip.pcie
        group = self._interconnect.group(transfer)
        if self._interconnect.network(transfer) == "dcn":
            num_members = self._interconnect.num_slices if transfer.between_slices else len(group)
            return "dcn", transfer.received_bytes(num_members) / self._chip.dcn
        bandwidth = self._chip.ici_link * self._interconnect.links(group)
        return "ici", transfer.received_bytes(len(group)) / bandwidth


def kernel_flops(kernel: Instruction) -> tuple[str, float | None]:
    """Name of a custom kernel, and the FLOPs of one call; None for a kernel that is not known."""
    name = kernel.name.split(".")[0]
    shapes = [shape for dtype, shape in kernel.operand_arrays if dtype in ("bf16", "f32")]
    if name in ("gmm", "tgmm"):  # of megablox
        return name, grouped_matmul_flops([shape for shape in shapes if len(shape) >= 2])
    kind = next((kind for kind in _SPLASH_MATMULS if kind in name), None)
    shapes = [shape for shape in shapes if len(shape) >= 3]
    if not name.startswith("splash") or kind is None or len(shapes) < 2:
        return name, None
    queries, keys = shapes[:2]
    is_fused = kind == "dkv" and len(kernel.arrays) > 4  # it computes the gradient of the queries as well
    matmuls = _SPLASH_MATMULS[kind] + is_fused
    share = _computed_share(kernel, "" if kind == "fwd" else f"_{kind}", queries[-2], keys[-2])
    return name, matmuls * 2.0 * math.prod(queries) * keys[-2] * share


def _computed_share(splash: Instruction, suffix: str, num_queries: int, num_keys: int) -> float:
    """Share of all blocks [queries, keys] that splash attention computes; a mask is taken for causal.

    Its first operand has the shape of the grid, which is narrower than all blocks if there is a window. Its metadata
    has the sizes of the blocks, with a suffix in the backward pass. With context parallelism, a device has an equal
    share of the blocks of a row.
    """
    grid = next((shape[-2:] for dtype, shape in splash.operand_arrays[:1] if dtype.startswith("s")), None)
    # A mask reads the positions of the queries. Segment ids are two arrays, of queries and of keys.
    if grid is None or sum(dtype == "s32" and len(shape) == 2 for dtype, shape in splash.operand_arrays) % 2 == 0:
        return 1.0
    sizes = [splash.attribute(rf'block_{axis}{suffix}\\": (\d+)') for axis in ("q", "kv")]
    rows, columns = (
        length // int(size) if size else max(grid) for length, size in zip((num_queries, num_keys), sizes, strict=True)
    )
    parts = num_keys // num_queries
    all_rows = rows * parts
    if grid[0] == rows:
        computed = sum(min(grid[1], math.ceil((row + 1) * columns / all_rows)) for row in range(all_rows))
    else:
        computed = sum(min(grid[0] * parts, all_rows - column * all_rows // columns) for column in range(columns))
    return computed / (all_rows * columns)


def grouped_matmul_flops(shapes: list[tuple[int, ...]]) -> float | None:
    """FLOPs of rows [R, D] times matrices [E, D, F] or [E, F, D], or of rows [R, D] times rows [R, F] (`tgmm`)."""
    if len(shapes) != 2 or len(shapes[0]) != 2:
        return None
    rows, other = shapes
    return 2.0 * math.prod(rows) * (other[-1] if len(other) == 2 else math.prod(other[1:]) / rows[-1])
