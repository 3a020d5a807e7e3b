"""How long a step would take on TPUs, from the program that their compiler made. A prediction, not a measurement.

The compiler estimates the clock cycles of each fusion. What it leaves out is added here:

- a custom kernel takes its FLOPs at `KERNEL_RATE` of the peak;
- a collective over ICI takes `V / (link × ways)`. V is what each device receives: of n devices and S bytes of the whole
  array, S (n − 1) / n to gather or to scatter, twice that to all-reduce, S to permute. `ways` are the directions it
  comes from: two for each ring that the group fills, one for each open row of chips;
- a collective between slices takes `V / (a device's share of its host's DCN)`;
- what moves between a device and its host's memory takes its bytes over the speed of PCIe.

The program is scheduled: what was begun early is waited for only as long as the work in between does not cover it.
Groups are taken to have their links for themselves, and copies inside a chip to be free.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Literal

from paxcli.programs.collectives import Collective, Network, Wiring, collective_of
from paxcli.programs.hlo import Instruction, Program
from paxcli.programs.host_transfers import HostTransfer, host_transfer_of

# Hz: the published peak over the FLOPs of a cycle, which are MXUs × 2 × the 128² or 256² cells of each.
_CLOCK = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
# Bytes per second, one link one way; then of a host's network, and the devices that share it. Austin et al., "How to
# Scale Your Model" (2025), chapter 2.
_LINK = {"v4": 45e9, "v5e": 45e9, "v5p": 90e9, "v6e": 90e9, "tpu7x": 90e9}
_DCN_PER_HOST = 25e9
_DEVICES_PER_HOST = {"tpu7x": 8}
_PCIE = 15e9  # of each device, one way; the figure that the same chapter reckons with

# Of the peak, counting every product of a query and a key, those too that a mask lets a kernel skip. Of MaxText's 22B
# model on 2 × v4-128, published at 13.65 s a step, the compiler's estimate of the rest leaves its kernels 0.61.
KERNEL_RATE = 0.5

Carrier = Network | Literal["host"]
_CARRIERS: tuple[Carrier, ...] = ("ici", "dcn", "host")

_MATMUL = frozenset({"convolution", "dot"})
# Inside the attention layer, but in none of its projections: of `layers.attention`, whose methods are scopes.
_ATTENTION = re.compile(r"/attention/(?!attention\._(queries|keys_and_values|merged)/)")
_PRODUCTS = {"fwd": 2, "dkv": 5, "dq": 3}  # of splash attention's kernels, each T × T × H multiply-adds a head


def is_predictable(generation: str | None) -> bool:
    """Whether a clock and the speed of the links are known."""
    return generation in _CLOCK


@dataclasses.dataclass
class Prediction:
    """Seconds of a step, and what they are made of.

    Attributes:
      matmul: Fusions with a matrix product, outside attention.
      attention: Fusions of queries, keys, probabilities and values.
      kernels: Custom kernels, by their FLOPs.
      other: All other fusions.
      exposed: Waiting for what is sent, by what carries it.
      communication: What is sent, hidden or not, likewise.
      kernel_calls: Custom kernel → how often it runs.
      unknown_kernels: Those whose FLOPs are not known, taken to be free.
    """

    matmul: float = 0.0
    attention: float = 0.0
    kernels: float = 0.0
    other: float = 0.0
    exposed: dict[Carrier, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_CARRIERS, 0.0))
    communication: dict[Carrier, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_CARRIERS, 0.0))
    kernel_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_kernels: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.kernels + self.other + sum(self.exposed.values())

    def add(self, part: Prediction) -> None:
        """Adds another's seconds."""
        for name in ("matmul", "attention", "kernels", "other"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for mine, theirs in ((self.exposed, part.exposed), (self.communication, part.communication)):
            for carrier, seconds in theirs.items():
                mine[carrier] += seconds
        self.kernel_calls += part.kernel_calls
        self.unknown_kernels += part.unknown_kernels


def predict(program: Program, wiring: Wiring, peak_flops: float) -> Prediction:
    """Predicts a step.

    Args:
      program: As compiled for a TPU.
      wiring: Its devices.
      peak_flops: Of one device, per second.
    """
    return _Clock(program, wiring, peak_flops).run(program.entry, 1)


class _Clock:
    """Runs a scheduled program and keeps the time."""

    def __init__(self, program: Program, wiring: Wiring, peak_flops: float):
        self.program, self.wiring, self.peak = program, wiring, peak_flops

    def run(self, name: str, times: int) -> Prediction:
        """What `times` runs of a computation take."""
        spent = Prediction()
        now, free = 0.0, dict[Carrier, float]()  # free: when each carrier is
        arrivals: dict[str, tuple[Carrier, float]] = {}  # by key, of what is on its way
        keys: dict[str, str] = {}
        for instruction in self.program.computations.get(name, ()):
            if instruction.opcode in ("while", "call", "conditional"):
                spent.add(self._inner(instruction, times))
                continue
            seconds = self._compute(instruction, times, spent)
            now += seconds
            sent = collective_of(self.program, instruction) or host_transfer_of(instruction)
            if sent is None:
                continue
            keys[instruction.name] = sent.key
            if sent.part in ("whole", "begin"):
                carrier, took = self._journey(sent)
                spent.communication[carrier] += took * times
                free[carrier] = max(now, free.get(carrier, 0.0)) + took
                arrivals[sent.key] = carrier, free[carrier]
            if sent.part in ("whole", "end"):
                key = keys.get(sent.key, sent.key)  # an end names the instruction that began it
                carrier, arrival = arrivals.pop(key, ("ici", now))
                spent.exposed[carrier] += max(0.0, arrival - now) * times
                now = max(now, arrival)
        return spent

    def _inner(self, instruction: Instruction, times: int) -> Prediction:
        if instruction.opcode == "conditional":
            return max((self.run(branch, times) for branch in instruction.called), key=lambda branch: branch.seconds)
        total = Prediction()
        for called in instruction.called:
            total.add(self.run(called, times * self.program.trips(instruction)))
        return total

    def _compute(self, instruction: Instruction, times: int, spent: Prediction) -> float:
        """Seconds of one run of an instruction, without what it sends."""
        if is_kernel(instruction):
            name, flops = kernel_flops(instruction)
            spent.kernel_calls[name] += times
            if flops is None:
                spent.unknown_kernels[name] += times
            seconds = (flops or 0.0) / (KERNEL_RATE * self.peak)
            spent.kernels += seconds * times
            return seconds
        seconds = instruction.cycles / _CLOCK[self.wiring.generation]
        if _ATTENTION.search(instruction.op_name):
            spent.attention += seconds * times
        elif seconds and self.program.inner(instruction, _MATMUL) is not None:
            spent.matmul += seconds * times
        else:
            spent.other += seconds * times
        return seconds

    def _journey(self, sent: Collective | HostTransfer) -> tuple[Carrier, float]:
        """What carries it, and the seconds that it takes."""
        if isinstance(sent, HostTransfer):
            return "host", sent.moved_bytes / _PCIE
        generation, group = self.wiring.generation, self.wiring.group(sent)
        if self.wiring.network(sent) == "dcn":
            members = self.wiring.num_slices if sent.over_dcn else len(group)
            return "dcn", sent.traffic(members) * _DEVICES_PER_HOST.get(generation, 4) / _DCN_PER_HOST
        return "ici", sent.traffic(len(group)) / (_LINK[generation] * self.wiring.ways(group))


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a custom kernel (Pallas, Mosaic), of which the compiler estimates nothing."""
    return instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.rest


def kernel_flops(kernel: Instruction) -> tuple[str, float | None]:
    """The name of a custom kernel and the FLOPs of a run, None where no formula is known."""
    name = kernel.name.split(".")[0]
    products = next((count for kind, count in _PRODUCTS.items() if kind in name), None)
    shapes = [shape for kind, shape in kernel.operand_arrays if kind in ("bf16", "f32") and len(shape) >= 3]
    if not name.startswith("splash") or products is None or len(shapes) < 2:
        return name, None
    queries, keys = shapes[:2]
    return name, products * 2.0 * math.prod(queries) * keys[-2]


def shares(prediction: Prediction) -> dict[str, float]:
    """Parts of the step, which add up to 1."""
    parts: dict[str, float] = {name: getattr(prediction, name) for name in ("matmul", "attention", "kernels", "other")}
    parts |= {f"exposed_{carrier}": seconds for carrier, seconds in prediction.exposed.items()}
    return {name: seconds / prediction.seconds for name, seconds in parts.items()} if prediction.seconds else parts
