"""What a compiled program moves between the memories of a device and of its host."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from paxcli.metrics.hlo import Instruction, Program

# XLA writes the memory of an array into its layout: `bf16[48,1024]{1,0:T(8,128)S(5)}`. 5 is the host's.
_ARRAY = re.compile(r"(\w+\[[\d,]*\])(?:\{([^}]*)\})?")
_HOST = "S(5)"
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
    arrays = _ARRAY.findall(instruction.result)
    if part != "start" or not any(_HOST in layout for _, layout in arrays):
        return None
    # The result names both sides, and of a slice the whole that it is part of, which is on the host.
    here = [dataclasses.replace(instruction, result=array) for array, layout in arrays if _HOST not in layout]
    return HostTransfer(max(one.largest_bytes for one in here), instruction.name, "begin")


def count_host_transfers(program: Program) -> dict[str, int]:
    """How often a step moves something between device and host, and bytes in all: `count` and `bytes`."""
    found = [(one, times) for instruction, times in program.run() if (one := host_transfer_of(instruction))]
    begun = [(one.moved_bytes, times) for one, times in found if one.part == "begin"]
    return {"count": sum(times for _, times in begun), "bytes": sum(size * times for size, times in begun)}
