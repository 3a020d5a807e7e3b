"""Copies between device and host memory in a compiled program."""

from __future__ import annotations

from paxcli.programs.collectives import HOST, Collective
from paxcli.programs.hlo import Instruction, Program

_COPIES = frozenset({"copy", "dynamic-slice", "dynamic-update-slice"})


def find_host_transfer(instruction: Instruction) -> Collective | None:
    """The asynchronous copy of an instruction between device and host memory; None if there is none.

    The done of a copy inside the device is returned too: no start has its key.
    """
    kind, _, part = instruction.opcode.rpartition("-")
    if kind not in _COPIES:
        return None
    if part == "done":
        return Collective(HOST, 0, None, False, instruction.operands[0], "done")
    sizes = instruction.result_memory
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
