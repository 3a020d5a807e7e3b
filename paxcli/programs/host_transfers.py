"""Copies between device and host memory in a compiled program."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paxcli.programs.hlo import Instruction, Program

_COPIES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """An asynchronous copy between device and host memory.

    Attributes:
      num_bytes: Bytes copied; 0 for a done.
      key: Name of the instruction that starts it.
      part: Whether the instruction starts it or waits for it.
    """

    num_bytes: int
    key: str
    part: Literal["start", "done"]


def find_host_transfer(instruction: Instruction) -> HostTransfer | None:
    """The host transfer of an instruction; None if there is none.

    The done of a copy inside the device is returned too: no start has its key.
    """
    kind, _, part = instruction.opcode.rpartition("-")
    if kind not in _COPIES:
        return None
    if part == "done":
        return HostTransfer(0, instruction.operands[0], "done")
    sizes = instruction.result_memory
    if part != "start" or not any(on_host for _, on_host in sizes):
        return None
    # The result has both sides, and, for a slice, the array on the host that the slice is part of.
    return HostTransfer(max(size for size, on_host in sizes if not on_host), instruction.name, "start")


def count_host_transfers(program: Program) -> dict[str, int]:
    """Host transfers of one step: `count`, and `bytes` in total."""
    found = [
        (one, times)
        for instruction, times in program.scheduled_instructions()
        if (one := find_host_transfer(instruction))
    ]
    started = [(one.num_bytes, times) for one, times in found if one.part == "start"]
    return {"count": sum(times for _, times in started), "bytes": sum(size * times for size, times in started)}
