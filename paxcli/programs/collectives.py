"""Transfers of a compiled program: collectives, with their groups and networks, and copies from and to the host."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

from paxcli.programs.hlo import HOST_MEMORY, Instruction, Program

Network = Literal["ici", "dcn"]

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_CALLS = frozenset({"fusion", "call-start"})  # the second runs on SparseCores, beside the rest of the program
HOST = "host"  # the kind of a copy between device and host memory
_COPIES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How the devices of a program are connected.

    Attributes:
      generation: TPU generation, such as `v4`.
      coordinates: (slice, x, y, z) of each device, in mesh order.
      shape: Chips along x, y and z.
      wraps: Whether each of these axes is a ring.
    """

    generation: str
    coordinates: Sequence[tuple[int, ...]]
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len({slice_index for slice_index, *_ in self.coordinates})

    def network(self, collective: Collective) -> Network:
        """Network that carries a collective."""
        slices = {self.coordinates[device][0] for device in self.group(collective)}
        return "dcn" if collective.between_slices or len(slices) > 1 else "ici"

    def group(self, collective: Collective) -> Sequence[int]:
        """Positions in the mesh of the devices that take part in a collective."""
        return range(len(self.coordinates)) if collective.group is None else collective.group

    def links(self, group: Sequence[int]) -> float:
        """Links over which a member of a group receives at once: two for a full ring, one for an open row of chips.

        Where a chip is two devices, in groups of their own, each receives over half as many.
        """
        extents = [len({self.coordinates[device][axis + 1] for device in group}) for axis in range(len(self.shape))]
        per_axis = [
            2 if wraps and extent == size > 2 else 1
            for extent, size, wraps in zip(extents, self.shape, self.wraps, strict=True)
            if extent > 1
        ]
        devices_per_chip = len(self.coordinates) / len(set(self.coordinates))
        groups_per_chip = devices_per_chip * len({self.coordinates[device] for device in group}) / len(group)
        return max(sum(per_axis), 1) / groups_per_chip


@dataclasses.dataclass(frozen=True)
class Collective:
    """The communication of one instruction, with other devices or with the memory of the host.

    Attributes:
      kind: One of `KINDS`, or `HOST`.
      full_bytes: Bytes of the full array: after gathering, before reducing or scattering; what a permute sends.
      group: Devices that take part, as positions in the mesh; None = all.
      between_slices: Whether the hosts exchange it between slices.
      key: Identifies the instructions of one asynchronous collective.
      part: Whether the instruction is a synchronous collective, or the start, middle or done of an asynchronous one.
    """

    kind: str
    full_bytes: int
    group: list[int] | None
    between_slices: bool
    key: str
    part: Literal["sync", "start", "middle", "done"]

    def received_bytes(self, num_members: int) -> float:
        """Bytes that each member of a group of this size receives."""
        if self.kind == "collective-permute":
            return self.full_bytes
        once = self.full_bytes * (num_members - 1) / num_members
        return 2 * once if self.kind == "all-reduce" else once


def find_collective(program: Program, instruction: Instruction) -> Collective | None:
    """The collective of an instruction, itself or inside a fusion; None if there is none."""
    opcode = instruction.opcode
    if opcode in ("send", "recv") and "xla_megascale" in instruction.rest:
        return _between_slices(program, instruction)
    if opcode in ("recv-done", "call-done", *(f"{kind}-done" for kind in KINDS)):
        return Collective(opcode.removesuffix("-done"), 0, None, False, instruction.operands[0], "done")
    if opcode in _CALLS:
        inside = program.find_inside(instruction, KINDS)
        return None if inside is None else _in_call(instruction, inside)
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    part = "sync" if kind == opcode else "start"
    return Collective(kind, _full_bytes(instruction), instruction.replica_group, False, instruction.name, part)


def _between_slices(program: Program, instruction: Instruction) -> Collective:
    """The hosts' part of a collective between slices: it starts at `send`, and is done at `recv-done`.

    Of an all-gather, a host receives the full arrays; of a reduce-scatter, it sends them.
    """
    kind = instruction.attribute(r'_xla_megascale_transfer_type="([A-Z_]+)"').lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"
    key = instruction.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"') or instruction.name
    both = (one for inside in program.computations.values() for one in inside if one.opcode in ("send", "recv"))
    sizes = [size for one in both if f'"{key}"' in one.rest for size in one.array_bytes] or instruction.array_bytes
    part = "start" if instruction.opcode == "send" else "middle"
    return Collective(kind, max(sizes, default=0), None, True, key, part)


def _in_call(call: Instruction, inside: Instruction) -> Collective:
    # XLA:TPU's `all-reduce-scatter`: each device keeps its shard.
    is_scatter = inside.opcode == "all-reduce" and sum(call.array_bytes) < sum(inside.array_bytes)
    kind = "reduce-scatter" if is_scatter else inside.opcode
    part = "start" if call.opcode == "call-start" else "sync"
    for word, found in (("collective-start", "start"), ("collective-done", "done"), ("collective_fusion", "middle")):
        if word in call.name or f"async_{word}" in call.rest:
            part = found
    key = inside.attribute(r"channel_id=(\d+)") or inside.name  # start and done share a channel
    return Collective(kind, _full_bytes(inside), inside.replica_group, False, key, part)


def _full_bytes(instruction: Instruction) -> int:
    """Bytes of the full arrays. XLA combines collectives into one of several arrays.

    The result of a start lists its operands before its results, except that of an all-reduce.
    """
    number, sizes = len(instruction.operands), instruction.array_bytes
    num_members = len(instruction.replica_group or [0]) if instruction.opcode.startswith("reduce-scatter") else 1
    return (sum(sizes[number : 2 * number]) or sum(sizes)) * num_members


def count_collectives(program: Program, interconnect: Interconnect | None) -> list[dict[str, Any]]:
    """Collectives of one step by `kind` and `network`: their `count`, and the `bytes` of the full arrays."""
    count, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for instruction, times in program.scheduled_instructions():
        collective = find_collective(program, instruction)
        if collective is not None and collective.part in ("sync", "start"):
            key = collective.kind, interconnect.network(collective) if interconnect else "local"
            count[key] += times
            size[key] += times * collective.full_bytes
    return [
        {"kind": kind, "network": net, "count": count[kind, net], "bytes": size[kind, net]}
        for kind, net in sorted(count)
    ]


def find_all_gathers(program: Program, shapes: Collection[tuple[int, ...]]) -> list[str]:
    """All-gathers whose result has one of these shapes, such as `bf16[13,2560,10240]`: the parameters of all layers."""
    found = set()
    for instruction, _ in program.scheduled_instructions():
        gather = program.find_inside(instruction, ("all-gather",)) if instruction.opcode in _CALLS else instruction
        if gather is not None and gather.opcode.startswith("all-gather"):
            found |= {f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in gather.arrays if shape in shapes}
    return sorted(found)


def find_host_transfer(instruction: Instruction) -> Collective | None:
    """The asynchronous copy of an instruction between device and host memory; None if there is none.

    The done of a copy inside the device is returned too: no start has its key.
    """
    kind, _, part = instruction.opcode.rpartition("-")
    if kind not in _COPIES:
        return None
    if part == "done":
        return Collective(HOST, 0, None, False, instruction.operands[0], "done")
    sizes = [(size, HOST_MEMORY in layout) for size, layout in instruction.result_memory]
    if part != "start" or not any(on_host for _, on_host in sizes):
        return None
    # The result has both sides, and, for a slice, the array on the host that the slice is part of.
    copied = max(size for size, on_host in sizes if not on_host)
    return Collective(HOST, copied, None, False, instruction.name, "start")


def count_host_transfers(program: Program) -> dict[str, int]:
    """Host transfers of one step: `count`, and `bytes` in total."""
    found = ((find_host_transfer(instruction), times) for instruction, times in program.scheduled_instructions())
    started = [(one.full_bytes, times) for one, times in found if one is not None and one.part == "start"]
    return {"count": sum(times for _, times in started), "bytes": sum(size * times for size, times in started)}
