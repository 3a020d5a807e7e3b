"""Predicts the time of a step on TPUs from its compiled program. A prediction, not a measurement.

The TPU compiler estimates the clock cycles of each fusion. What it does not estimate is modelled here:

- a custom kernel, of attention or a grouped matmul, runs its FLOPs at `KERNEL_RATE` of the peak;
- a collective over ICI takes `V / (bandwidth × links)`. V is what each of n devices receives. For a full array of S
  bytes, that is S (n − 1) / n in an all-gather or reduce-scatter, twice that in an all-reduce, S in a permute. A group
  receives over two links for each ring that it fills, and over one for each open row of chips;
- a collective between slices takes `V / (a device's share of its host's DCN bandwidth)`;
- a transfer between device and host memory takes its bytes over the bandwidth of PCIe.

The program is scheduled: of an asynchronous transfer, only the time that the work between its start and its done does
not hide is exposed. Groups are assumed not to share links, and copies inside a chip to be free.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Literal

from paxcli.programs.attribution import MATMUL_OPCODES, PALLAS_TARGET, is_attention
from paxcli.programs.collectives import HOST, Collective, Interconnect, Network, find_collective
from paxcli.programs.hlo import CONTROL_FLOW, Instruction, Program
from paxcli.programs.host_transfers import find_host_transfer

# Hz: the published peak divided by the FLOPs of a cycle, which are MXUs × 2 × the 128² or 256² cells of each.
_CLOCK = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
# Bytes per second: of an ICI link in one direction, of a host's DCN, of a device's PCIe in one direction, chapter 2 of
# "How to Scale Your Model" (Austin et al., 2025).
_ICI_LINK = {"v4": 45e9, "v5e": 45e9, "v5p": 90e9, "v6e": 90e9, "tpu7x": 90e9}
_DCN_PER_HOST = 25e9
_PCIE = 15e9
_DEVICES_PER_HOST = {"tpu7x": 8}

# Share of the peak, counting all pairs of a query and a key, also those that a kernel skips because they are masked. In
# MaxText's step of its 22B model on 2 × v4-128, published at 13.65 s, the compiler's estimate of everything else leaves
# its kernels 0.61.
KERNEL_RATE = 0.5

Carrier = Network | Literal["host"]
_CARRIERS = ("ici", "dcn", "host")
_PARTS = ("matmul", "attention", "kernels", "other", *(f"exposed_{carrier}" for carrier in _CARRIERS))

_SPLASH_MATMULS = {"fwd": 2, "dkv": 5, "dq": 3}  # of each kernel of splash attention; T × T × H multiply-adds a head


def is_predictable(generation: str | None) -> bool:
    """Whether the clock and the link bandwidth of a TPU generation are known."""
    return generation in _CLOCK


@dataclasses.dataclass
class Prediction:
    """Seconds of a step by what they are spent on.

    Attributes:
      parts: `matmul`, fusions with a matmul outside attention; `attention`, fusions of attention without its
        projections; `kernels`, custom kernels by their FLOPs; `other` fusions; and `exposed_ici`, `exposed_dcn` and
        `exposed_host`, waiting for transfers that compute does not hide. They add up to the step.
      communication: All transfers, hidden or exposed, by carrier.
      kernel_calls: Custom kernel → number of calls.
      unknown_kernels: Calls of kernels whose FLOPs are unknown; they are counted as free.
    """

    parts: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    communication: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_CARRIERS, 0.0))
    kernel_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_kernels: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def add(self, other: Prediction) -> None:
        """Adds the seconds and calls of another prediction."""
        for total, added in ((self.parts, other.parts), (self.communication, other.communication)):
            for name, seconds in added.items():
                total[name] += seconds
        self.kernel_calls += other.kernel_calls
        self.unknown_kernels += other.unknown_kernels

    def shares(self) -> dict[str, float]:
        """Share of the step that each part takes; they add up to 1."""
        return {name: seconds / (self.seconds or 1.0) for name, seconds in self.parts.items()}


def predict(program: Program, interconnect: Interconnect, peak_flops: float) -> Prediction:
    """Predicts one step.

    Args:
      program: Compiled for TPUs.
      interconnect: Of its devices.
      peak_flops: FLOP/s of one device.
    """
    return _Simulation(program, interconnect, peak_flops).run(program.entry, 1)


class _Simulation:
    """Runs a scheduled program against a clock."""

    def __init__(self, program: Program, interconnect: Interconnect, peak_flops: float):
        self._program, self._interconnect, self._peak_flops = program, interconnect, peak_flops

    def run(self, computation: str, times: int) -> Prediction:
        """Seconds that `times` runs of a computation take."""
        spent = Prediction()
        now = 0.0
        busy_until: dict[Carrier, float] = {}
        arrivals: dict[str, tuple[Carrier, float]] = {}  # of transfers in flight, by key
        keys: dict[str, str] = {}  # of transfers, by the name of an instruction
        for instruction in self._program.computations.get(computation, ()):
            if instruction.opcode in CONTROL_FLOW:
                spent.add(self._run_called(instruction, times))
                continue
            now += self._compute_seconds(instruction, times, spent)
            transfer = find_collective(self._program, instruction) or find_host_transfer(instruction)
            if transfer is None:
                continue
            keys[instruction.name] = transfer.key
            if transfer.part in ("sync", "start"):
                carrier, seconds = self._transfer_seconds(transfer)
                spent.communication[carrier] += seconds * times
                busy_until[carrier] = max(now, busy_until.get(carrier, 0.0)) + seconds
                arrivals[transfer.key] = carrier, busy_until[carrier]
            if transfer.part in ("sync", "done"):
                key = keys.get(transfer.key, transfer.key)  # a done names the instruction that started it
                carrier, arrival = arrivals.pop(key, ("ici", now))
                spent.parts[f"exposed_{carrier}"] += max(0.0, arrival - now) * times
                now = max(now, arrival)
        return spent

    def _run_called(self, instruction: Instruction, times: int) -> Prediction:
        """A loop, a call, or the slowest branch of a conditional."""
        if instruction.opcode == "conditional":
            return max((self.run(branch, times) for branch in instruction.called), key=lambda branch: branch.seconds)
        total = Prediction()
        for called in instruction.called:
            total.add(self.run(called, times * self._program.trip_count(instruction)))
        return total

    def _compute_seconds(self, instruction: Instruction, times: int, spent: Prediction) -> float:
        """Seconds that one run of an instruction computes; adds `times` of them to `spent`."""
        if instruction.opcode == "custom-call" and instruction.call_target == PALLAS_TARGET:
            name, flops = kernel_flops(instruction)
            spent.kernel_calls[name] += times
            if flops is None:
                spent.unknown_kernels[name] += times
            part, seconds = "kernels", (flops or 0.0) / (KERNEL_RATE * self._peak_flops)
        else:
            cycles = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)
            seconds = cycles / _CLOCK[self._interconnect.generation]
            is_matmul = seconds and self._program.find_inside(instruction, MATMUL_OPCODES) is not None
            part = "attention" if is_attention(instruction.op_name) else "matmul" if is_matmul else "other"
        spent.parts[part] += seconds * times
        return seconds

    def _transfer_seconds(self, transfer: Collective) -> tuple[Carrier, float]:
        """The link that carries a transfer, and its seconds."""
        if transfer.kind == HOST:
            return "host", transfer.full_bytes / _PCIE
        generation, group = self._interconnect.generation, self._interconnect.group(transfer)
        if self._interconnect.network(transfer) == "dcn":
            num_members = self._interconnect.num_slices if transfer.between_slices else len(group)
            num_sharing = _DEVICES_PER_HOST.get(generation, 4)
            return "dcn", transfer.received_bytes(num_members) * num_sharing / _DCN_PER_HOST
        bandwidth = _ICI_LINK[generation] * self._interconnect.links(group)
        return "ici", transfer.received_bytes(len(group)) / bandwidth


def kernel_flops(kernel: Instruction) -> tuple[str, float | None]:
    """Name of a custom kernel, and the FLOPs of one call; None if there is no formula for it."""
    name = kernel.name.split(".")[0]
    shapes = [shape for dtype, shape in kernel.operand_arrays if dtype in ("bf16", "f32")]
    if name in ("gmm", "tgmm"):  # of megablox
        return name, _grouped_matmul_flops([shape for shape in shapes if len(shape) >= 2])
    matmuls = next((count for kind, count in _SPLASH_MATMULS.items() if kind in name), None)
    shapes = [shape for shape in shapes if len(shape) >= 3]
    if not name.startswith("splash") or matmuls is None or len(shapes) < 2:
        return name, None
    queries, keys = shapes[:2]
    return name, matmuls * 2.0 * math.prod(queries) * keys[-2]


def _grouped_matmul_flops(shapes: list[tuple[int, ...]]) -> float | None:
    """FLOPs of rows [R, D] times matrices [E, D, F] or [E, F, D], or of rows [R, D] times rows [R, F] (`tgmm`)."""
    if len(shapes) != 2 or len(shapes[0]) != 2:
        return None
    rows, other = shapes
    return 2.0 * math.prod(rows) * (other[-1] if len(other) == 2 else math.prod(other[1:]) / rows[-1])
