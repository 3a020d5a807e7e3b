"""What a compiled program moves between the memories of a device and of its host."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paxcli.programs.hlo import Instruction, Program

_MOVES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """A move between device and host.

    Attributes:
      moved_bytes: What is moved; 0 at its end.
      key: The name of the instruction that begins it.
      part: Whether the instruction begins or ends it.
    """

    moved_bytes: int
    key: str
    part: Literal["begin", "end"]


def host_transfer_of(instruction: Instruction) -> HostTransfer | None:
    """What an instruction moves; None if nothing. Ends of moves inside the device count too: of moves never begun."""
    kind, _, part = instruction.opcode.rpartition("-")
    if kind not in _MOVES:
        return None
    if part == "done":
        return HostTransfer(0, instruction.operands[0], "end")
    sizes = instruction.placed_bytes
    if part != "start" or not any(on_host for _, on_host in sizes):
        return None
    # The result names both sides, and of a slice the whole that it is part of, which is on the host.
    return HostTransfer(max(size for size, on_host in sizes if not on_host), instruction.name, "begin")


def count_host_transfers(program: Program) -> dict[str, int]:
    """How often a step moves something between device and host, and bytes in all: `count` and `bytes`."""
    found = [(one, times) for instruction, times in program.run() if (one := host_transfer_of(instruction))]
    begun = [(one.moved_bytes, times) for one, times in found if one.part == "begin"]
    return {"count": sum(times for _, times in begun), "bytes": sum(size * times for size, times in begun)}
