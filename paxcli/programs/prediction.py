"""Predicts the time of a step from its compiled program: the program runs against a clock. Not a measurement.

How long an instruction computes, and how long a transfer takes over which link, is up to the machine: `tpu_machine.py`,
`gpu_machine.py`. Of an asynchronous transfer, only the time that the work between its start and its done does not hide
is exposed. Groups are assumed not to share links.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from paxcli.programs.attribution import REMATTED, attribute_instructions, is_attention
from paxcli.programs.collectives import Collective, Network, find_collective, find_host_transfer
from paxcli.programs.hlo import CONTROL_FLOW, Instruction, Program

Carrier = Network | Literal["nvlink", "host"]
_CARRIERS = ("ici", "dcn", "nvlink", "host")
_PARTS = ("matmul", "attention", "kernels", "other", *(f"exposed_{carrier}" for carrier in _CARRIERS))

# What bounds a part of the step, and what would change it.
BOUNDS = {
    "matmul": "a remat policy that saves more, where remat repeats them; else only more devices",
    "kernel": "shorter sequences, or a mask that hides more blocks",
    "hbm": "lower precision; for activations, a remat policy that saves less; for weights, a larger batch",
    "ici": "a larger batch on each device, or a mesh with less of the axis that communicates",
    "nvlink": "a larger batch on each device, or a mesh with less of the axis that communicates",
    "dcn": "a larger batch on each device, or fewer slices",
    "host": "offload less, or keep it on the devices",
}


class Cost(NamedTuple):
    """A part of the step: why it takes its time, where, and on what.

    Attributes:
      bound: One of `BOUNDS`; fusions without matmuls are bound by HBM.
      layer: Path of modules and scopes, such as `stack/layers/attention`; empty if unknown.
      what: The operation, and whether remat repeats it in the backward pass.
    """

    bound: str
    layer: str
    what: str


@dataclasses.dataclass
class Prediction:
    """Seconds of a step by what they are spent on.

    Attributes:
      parts: `matmul`, fusions with a matmul outside attention; `attention`, fusions of attention without its
        projections; `kernels`, custom kernels by their FLOPs; `other` fusions; and `exposed_ici`, `exposed_dcn`,
        `exposed_nvlink` and `exposed_host`, waiting for transfers that compute does not hide. They add up to the step.
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


class Computation(NamedTuple):
    """One run of an instruction, without its communication.

    Attributes:
      part: The part of `Prediction.parts`.
      bound: One of `BOUNDS`.
      what: The operation.
      seconds: How long; None = a kernel without a formula, which is counted as free.
      is_kernel: Whether it is a custom kernel.
    """

    part: str
    bound: str
    what: str
    seconds: float | None
    is_kernel: bool = False


def matmul_computation(instruction: Instruction, in_cores: float, in_hbm: float) -> Computation:
    """The computation of an instruction with matmuls: bound by their FLOPs or by memory traffic, whichever is slower.

    Args:
      instruction: The instruction.
      in_cores: Seconds that its FLOPs take.
      in_hbm: Seconds that its traffic takes.
    """
    part = "attention" if is_attention(instruction.op_name) else "matmul"
    bound = "matmul" if in_cores >= in_hbm else "hbm"
    return Computation(part, bound, instruction.operation, max(in_cores, in_hbm))


class Machine(Protocol):
    """The devices that a program was compiled for."""

    def compute(self, program: Program, instruction: Instruction, operands: Sequence[Instruction]) -> Computation:
        """The computation of an instruction; `operands` are the instructions that compute its operands."""

    def transfer(self, transfer: Collective) -> tuple[Carrier, float]:
        """The link that carries a transfer, and its seconds."""


def simulate(program: Program, machine: Machine) -> Prediction:
    """Predicts one step of a scheduled program."""
    return _Simulation(program, machine).run(program.entry, 1)


class _Simulation:
    """Runs a scheduled program against a clock."""

    def __init__(self, program: Program, machine: Machine):
        self._program, self._machine = program, machine
        self._layers = attribute_instructions(program)

    def run(self, computation: str, times: int) -> Prediction:
        """Seconds that `times` runs of a computation take."""
        spent = Prediction()
        now = 0.0
        arrivals: dict[str, tuple[Carrier, float, str]] = {}  # of transfers in flight, by key: when, and what
        keys: dict[str, str] = {}  # of transfers, by the name of an instruction
        instructions = self._program.computations.get(computation, ())
        by_name = {one.name: one for one in instructions}
        for instruction in instructions:
            if instruction.opcode in CONTROL_FLOW:
                inside = self._run_called(instruction, times)
                spent.add(inside)
                for key, (carrier, arrival, what) in arrivals.items():  # share the link with the loop's
                    shared = inside.communication[carrier] if arrival > now else 0.0
                    arrivals[key] = carrier, arrival + shared / (times or 1), what
                now += inside.seconds / (times or 1)
                continue
            operands = [by_name[name] for name in instruction.operands if name in by_name]
            now += self._compute_seconds(instruction, operands, times, spent)
            transfer = find_collective(self._program, instruction) or find_host_transfer(instruction)
            if transfer is None:
                continue
            keys[instruction.name] = transfer.key
            if transfer.part in ("sync", "start"):
                carrier, seconds = self._machine.transfer(transfer)
                spent.communication[carrier] += seconds * times
                free = max([now, *(arrival for other, arrival, _ in arrivals.values() if other == carrier)])
                what = f"{transfer.kind}, {transfer.full_bytes / 1e6:,.0f} MB"
                arrivals[transfer.key] = carrier, free + seconds, what
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
        computed = self._machine.compute(self._program, instruction, operands)
        if computed.is_kernel:
            spent.kernel_calls[computed.what] += times
        if computed.seconds is None:
            spent.unknown_kernels[computed.what] += times
            return 0.0
        what = computed.what + (", repeated by remat" if REMATTED in instruction.op_name else "")
        cost = Cost(computed.bound, self._layers[instruction.name].layer, what)
        spent.spend(computed.part, cost, computed.seconds * times)
        return computed.seconds
