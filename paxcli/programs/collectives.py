"""What a compiled program sends between devices, and over which network."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from paxcli.programs.hlo import Instruction, Program

Network = Literal["ici", "dcn"]

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_KINDS = frozenset(KINDS)
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')


@dataclasses.dataclass(frozen=True)
class Wiring:
    """How the devices of a program are connected.

    Attributes:
      generation: Of the TPU, such as `v4`.
      coordinates: Of each device, in the order of the mesh: (slice, x, y, z).
      shape: Chips along x, y, z.
      wraps: Which of these are rings.
    """

    generation: str
    coordinates: Sequence[tuple[int, ...]]
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    @property
    def num_slices(self) -> int:
        """How many slices there are."""
        return len({slice_index for slice_index, *_ in self.coordinates})

    def network(self, sent: Collective) -> Network:
        """What carries a collective."""
        return "dcn" if sent.over_dcn or len({self.coordinates[place][0] for place in self.group(sent)}) > 1 else "ici"

    def group(self, sent: Collective) -> Sequence[int]:
        """Places in the mesh of those who take part in a collective."""
        return range(len(self.coordinates)) if sent.group is None else sent.group

    def ways(self, group: Sequence[int]) -> int:
        """Directions from which a member can receive at once: two of each ring, one of each open row of chips."""
        extents = [len({self.coordinates[place][axis + 1] for place in group}) for axis in range(len(self.shape))]
        rows = [
            2 if wraps and extent == size > 2 else 1
            for extent, size, wraps in zip(extents, self.shape, self.wraps, strict=True)
            if extent > 1
        ]
        return max(sum(rows), 1)


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one instruction sends.

    Attributes:
      kind: One of `KINDS`.
      whole_bytes: Size of the whole array: gathered, reduced, or before it is scattered; of a permute, what is sent.
      group: Devices that take part, as places in the mesh; None = all.
      over_dcn: Whether the hosts hand it to other slices.
      key: What its begin, its middle and its end have in common.
      part: Whether the instruction is the whole of it, or begins it, carries it on or ends it.
    """

    kind: str
    whole_bytes: int
    group: list[int] | None
    over_dcn: bool
    key: str
    part: Literal["whole", "begin", "middle", "end"]

    def traffic(self, members: int) -> float:
        """Bytes that each of so many members receives."""
        if self.kind == "collective-permute":
            return self.whole_bytes
        once = self.whole_bytes * (members - 1) / members
        return 2 * once if self.kind == "all-reduce" else once


def collective_of(program: Program, instruction: Instruction) -> Collective | None:
    """What an instruction sends, itself or inside a fusion; None if nothing."""
    opcode = instruction.opcode
    if opcode in ("send", "recv") and "xla_megascale" in instruction.rest:
        return _between_slices(instruction)
    if opcode in ("recv-done", *(f"{kind}-done" for kind in KINDS)):
        return Collective(opcode.removesuffix("-done"), 0, None, False, instruction.operands[0], "end")
    if opcode == "fusion":
        inside = program.inner(instruction, _KINDS)
        return None if inside is None else _fused(instruction, inside)
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if kind != opcode:  # its result holds its operand, too
        return Collective(kind, instruction.largest_bytes, instruction.group, False, instruction.name, "begin")
    return Collective(kind, _whole(instruction), instruction.group, False, instruction.name, "whole")


def _between_slices(instruction: Instruction) -> Collective:
    """The hosts' part of a collective between slices: it begins at `send`, and ends when `recv` is done."""
    found, meeting = _TRANSFER.search(instruction.rest), _RENDEZVOUS.search(instruction.rest)
    kind = found[1].lower().replace("_", "-") if found else ""
    part = "begin" if instruction.opcode == "send" else "middle"
    key = meeting[1] if meeting else instruction.name
    return Collective(kind if kind in KINDS else "collective-permute", instruction.largest_bytes, None, True, key, part)


def _fused(fusion: Instruction, inside: Instruction) -> Collective:
    kind = inside.opcode
    if kind == "all-reduce" and fusion.result_bytes < inside.result_bytes:
        kind = "reduce-scatter"  # XLA:TPU's `all-reduce-scatter`: each device keeps its part
    part = "whole"
    for word, found in (("collective-start", "begin"), ("collective-done", "end"), ("collective_fusion", "middle")):
        if word in fusion.name or f"async_{word}" in fusion.rest:
            part = found
    return Collective(kind, _whole(inside), inside.group, False, inside.channel, part)


def _whole(instruction: Instruction) -> int:
    members = len(instruction.group or [0]) if instruction.opcode == "reduce-scatter" else 1
    return instruction.result_bytes * members


def count_collectives(program: Program, wiring: Wiring | None) -> list[dict[str, Any]]:
    """All that a step sends, by `kind` and `network`: `count`, and `bytes` of the whole arrays."""
    count, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for instruction, times in program.run():
        sent = collective_of(program, instruction)
        if sent is not None and sent.part in ("whole", "begin"):
            key = sent.kind, wiring.network(sent) if wiring else "local"
            count[key] += times
            size[key] += times * sent.whole_bytes
    return [
        {"kind": kind, "network": net, "count": count[kind, net], "bytes": size[kind, net]}
        for kind, net in sorted(count)
    ]


def gathered_whole(program: Program, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """All-gathers whose result has one of these shapes, as `bf16[13,2560,10240]`: such as parameters of all layers."""
    found = []
    for instruction, _ in program.run():
        inside = instruction if instruction.opcode.startswith("all-gather") else None
        if instruction.opcode == "fusion":
            inside = program.inner(instruction, frozenset({"all-gather"}))
        for kind, shape in inside.arrays if inside is not None else ():
            if shape in shapes:
                found.append(f"{kind}[{','.join(map(str, shape))}]")
    return sorted(set(found))
