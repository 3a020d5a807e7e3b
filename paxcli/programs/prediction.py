"""Predicts the time of a step on TPUs from its compiled program. A prediction, not a measurement.

The time of each instruction of the scheduled program is, on a chip of `chips.py`:

- a fusion with matmuls: its FLOPs at the chip's matmul rate, in FP8 times `fp8_speed`, or its traffic at the bandwidth
  of HBM, if that is longer;
- any other fusion: the clock cycles that the TPU compiler estimates;
- a custom kernel, of attention or a grouped matmul: its FLOPs at `KERNEL_RATE` of the peak;
- a collective over ICI: `V / (bandwidth × links)`. V is what each of n devices receives. For a full array of S bytes,
  that is S (n − 1) / n in an all-gather or reduce-scatter, twice that in an all-reduce, S in a permute. A group
  receives over two links for each ring that it fills, and over one for each open row of chips;
- a collective between slices: `V / (a device's share of its host's DCN bandwidth)`;
- a transfer between device and host memory: its bytes over the bandwidth of PCIe.

Each doubling of the number of slices adds `SLICE_WAIT` of the step, in which the slices wait for the slowest.

Of an asynchronous transfer, only the time that the work between its start and its done does not hide is exposed. Groups
are assumed not to share links, and copies inside a chip to be free.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from paxcli.programs.attribution import PALLAS_TARGET, attribute_instructions, is_attention
from paxcli.programs.chips import CHIPS
from paxcli.programs.collectives import HOST, Collective, Interconnect, Network, find_collective
from paxcli.programs.hlo import CONTROL_FLOW, Instruction, Program
from paxcli.programs.host_transfers import find_host_transfer
from paxcli.programs.roofline import hbm_bytes, matmul_flops

# Share of the peak at which a kernel multiplies the blocks that it does not skip.
KERNEL_RATE = 0.5

# In MaxText's published steps of one model on 1 to 32 slices, a doubling costs between 1 and 5 %.
SLICE_WAIT = 0.02

Carrier = Network | Literal["host"]
_CARRIERS = ("ici", "dcn", "host")
_PARTS = ("matmul", "attention", "kernels", "other", *(f"exposed_{carrier}" for carrier in _CARRIERS))

_SPLASH_MATMULS = {"fwd": 2, "dkv": 4, "dq": 3}  # of each kernel of splash attention; T × T × H multiply-adds a head

# What bounds a part of the step, and what would change it.
BOUNDS = {
    "matmul": "compute less again, with a remat policy that saves more",
    "kernel": "shorter sequences, or a mask that hides more blocks",
    "hbm": "a larger batch on each device, or a lower precision",
    "ici": "a larger batch on each device, or a mesh with less of the axis that communicates",
    "dcn": "a larger batch on each device, or fewer slices",
    "host": "offload less, or keep it on the devices",
}


class Cost(NamedTuple):
    """A part of the step: why it takes its time, where, and on what.

    Attributes:
      bound: One of `BOUNDS`; fusions without matmuls are bound by HBM.
      layer: Path of modules and scopes, such as `stack/layers/attention`; empty if unknown.
      what: The operation.
    """

    bound: str
    layer: str
    what: str


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
      costs: Seconds by cost; they add up to the step.
    """

    parts: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    communication: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_CARRIERS, 0.0))
    kernel_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    costs: dict[Cost, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def add(self, other: Prediction) -> None:
        """Adds the seconds and calls of another prediction."""
        for field in dataclasses.fields(self):  # each maps names to amounts
            total = getattr(self, field.name)
            for name, amount in getattr(other, field.name).items():
                total[name] += amount

    def spend(self, part: str, cost: Cost, seconds: float) -> None:
        """Adds seconds to a part."""
        if seconds:
            self.parts[part] += seconds
            self.costs[cost] += seconds

    def explain(self, num_costs: int = 10) -> dict[str, Any]:
        """Reasons for the length of the step: the `share` of each bound, what would change it, the largest `costs`."""
        total = self.seconds or 1.0
        shares = {name: sum(self.costs[one] for one in self.costs if one.bound == name) / total for name in BOUNDS}
        by_share = sorted(shares, key=shares.__getitem__, reverse=True)
        largest = sorted(self.costs.items(), key=lambda item: -item[1])[:num_costs]
        return {
            "bounds": {name: {"share": shares[name], "change": BOUNDS[name]} for name in by_share if shares[name]},
            "costs": [cost._asdict() | {"seconds": seconds, "share": seconds / total} for cost, seconds in largest],
        }

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
    prediction = _Simulation(program, interconnect, peak_flops).run(program.entry, 1)
    wait = prediction.seconds * SLICE_WAIT * math.log2(interconnect.num_slices)
    prediction.spend("exposed_dcn", Cost("dcn", "", "waiting for the slowest slice"), wait)
    return prediction


class _Simulation:
    """Runs a scheduled program against a clock."""

    def __init__(self, program: Program, interconnect: Interconnect, peak_flops: float):
        self._program, self._interconnect, self._peak_flops = program, interconnect, peak_flops
        self._chip = CHIPS[interconnect.generation]
        self._layers = attribute_instructions(program)

    def run(self, computation: str, times: int) -> Prediction:
        """Seconds that `times` runs of a computation take."""
        spent = Prediction()
        now = 0.0
        busy_until: dict[Carrier, float] = {}
        arrivals: dict[str, tuple[Carrier, float, str]] = {}  # of transfers in flight, by key: when, and what
        keys: dict[str, str] = {}  # of transfers, by the name of an instruction
        instructions = self._program.computations.get(computation, ())
        by_name = {one.name: one for one in instructions}
        for instruction in instructions:
            if instruction.opcode in CONTROL_FLOW:
                spent.add(self._run_called(instruction, times))
                continue
            operands = [by_name[name] for name in instruction.operands if name in by_name]
            now += self._compute_seconds(instruction, operands, times, spent)
            transfer = find_collective(self._program, instruction) or find_host_transfer(instruction)
            if transfer is None:
                continue
            keys[instruction.name] = transfer.key
            if transfer.part in ("sync", "start"):
                carrier, seconds = self._transfer_seconds(transfer)
                spent.communication[carrier] += seconds * times
                busy_until[carrier] = max(now, busy_until.get(carrier, 0.0)) + seconds
                what = f"{transfer.kind}, {transfer.full_bytes / 1e6:,.0f} MB"
                arrivals[transfer.key] = carrier, busy_until[carrier], what
            if transfer.part in ("sync", "done"):
                key = keys.get(transfer.key, transfer.key)  # a done names the instruction that started it
                carrier, arrival, what = arrivals.pop(key, ("ici", now, ""))
                cost = Cost(carrier, self._layers[instruction.name].layer, what)
                spent.spend(f"exposed_{carrier}", cost, max(0.0, arrival - now) * times)
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

    def _compute_seconds(
        self, instruction: Instruction, operands: Sequence[Instruction], times: int, spent: Prediction
    ) -> float:
        """Seconds that one run of an instruction computes; adds `times` of them to `spent`."""
        layer, what = self._layers[instruction.name].layer, instruction.op_name.rpartition("/")[2]
        if instruction.opcode == "custom-call" and instruction.call_target == PALLAS_TARGET:
            what, flops = kernel_flops(instruction)
            spent.kernel_calls[what] += times
            if flops is None:
                spent.unknown_kernels[what] += times
            part, bound, seconds = "kernels", "kernel", (flops or 0.0) / (KERNEL_RATE * self._peak_flops)
        elif flops := matmul_flops(self._program, instruction, self._chip.fp8_speed):
            part = "attention" if is_attention(instruction.op_name) else "matmul"
            in_mxu = flops / (self._chip.matmul_rate * self._peak_flops)
            in_hbm = hbm_bytes(self._program, instruction, operands) / self._chip.hbm
            bound, seconds = ("matmul", in_mxu) if in_mxu >= in_hbm else ("hbm", in_hbm)
        else:
            part, bound = "attention" if is_attention(instruction.op_name) else "other", "hbm"
            seconds = int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0) / self._chip.clock
        spent.spend(part, Cost(bound, layer, what), seconds * times)
        return seconds

    def _transfer_seconds(self, transfer: Collective) -> tuple[Carrier, float]:
        """The link that carries a transfer, and its seconds."""
        if transfer.kind == HOST:
            return "host", transfer.full_bytes / self._chip.pcie
        group = self._interconnect.group(transfer)
        if self._interconnect.network(transfer) == "dcn":
            num_members = self._interconnect.num_slices if transfer.between_slices else len(group)
            return "dcn", transfer.received_bytes(num_members) / self._chip.dcn
        bandwidth = self._chip.ici_link * self._interconnect.links(group)
        return "ici", transfer.received_bytes(len(group)) / bandwidth


def kernel_flops(kernel: Instruction) -> tuple[str, float | None]:
    """Name of a custom kernel, and the FLOPs of one call; None if there is no formula for it."""
    name = kernel.name.split(".")[0]
    shapes = [shape for dtype, shape in kernel.operand_arrays if dtype in ("bf16", "f32")]
    if name in ("gmm", "tgmm"):  # of megablox
        return name, grouped_matmul_flops([shape for shape in shapes if len(shape) >= 2])
    kind = next((kind for kind in _SPLASH_MATMULS if kind in name), None)
    shapes = [shape for shape in shapes if len(shape) >= 3]
    if not name.startswith("splash") or kind is None or len(shapes) < 2:
        return name, None
    queries, keys = shapes[:2]
    matmuls = _SPLASH_MATMULS[kind]
    if kind == "dkv" and len(kernel.arrays) > 4:  # the fused kernel: the gradient of the queries as well
        matmuls += 1
    share = _computed_share(kernel, "" if kind == "fwd" else f"_{kind}", queries[-2], keys[-2])
    return name, matmuls * 2.0 * math.prod(queries) * keys[-2] * share


def _computed_share(splash: Instruction, suffix: str, num_queries: int, num_keys: int) -> float:
    """Share of all blocks [queries, keys] that splash attention computes; the mask is taken for causal.

    Its first operand has the shape of the grid, which is narrower than all blocks if there is a window. Its metadata
    has the sizes of the blocks, with a suffix in the backward pass. With context parallelism, a device has an equal
    share of the blocks of a row.
    """
    grid = next((shape[-2:] for dtype, shape in splash.operand_arrays[:1] if dtype.startswith("s")), None)
    if grid is None:
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
