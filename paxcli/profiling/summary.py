"""Where the time of traced steps went: by kind of work, by layer, by operation, and when the device waited."""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from paxcli.profiling.timeline import divide
from paxcli.profiling.trace import Span, find_trace, read_trace
from paxcli.programs.instruction_names import CATEGORIES, CONTROL, Instruction, by_name, read_instructions

HLO_FILE = "train_step.hlo.txt"
MEMORY_FILE = "memory.json"

_NANOSECONDS = 1e9
_LEAST_GAP = 1e-5  # shorter ones are what starting an operation takes
_UNKNOWN = "(not known)"


def summarize(directory: str, top: int = 10) -> dict[str, Any]:
    """The newest trace of a run directory, or of a directory that holds one.

    Returns:
      `trace`; `devices`; `steps`; `seconds` that were traced on each device, and `step_seconds`; `shares` of that time
      by kind, which add up to 1 (of collectives only what nothing else ran beside; `hidden_collective_share` is the
      rest); `layers`, and the `top` `operations`, the longest first; `gaps`, in which devices waited: `count`,
      `seconds`, and the `longest` with what the host did then; `memory` in bytes, of the step's program and at most in
      use.

    Raises:
      DataError: There is no trace, or nothing in it.
    """
    place = find_trace(directory)
    trace = read_trace(place)
    hlo = place / HLO_FILE
    known = read_instructions(hlo.read_text()) if hlo.exists() else {}

    def instruction(name: str) -> Instruction:
        return known.get(name) or by_name(name)

    spent: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    gaps: list[tuple[float, float]] = []
    whole = hidden = idle = 0.0
    for spans in trace.operations.values():
        spans = [span for span in spans if instruction(span.name).opcode not in CONTROL]
        timeline = divide(spans, lambda name: instruction(name).category == "collective")
        for span, share in zip(spans, timeline.shares, strict=True):
            spent[span.name] += share
            counts[span.name] += 1
        whole, hidden, idle = whole + timeline.whole, hidden + timeline.hidden, idle + timeline.idle
        gaps += timeline.gaps
    devices = len(trace.operations)
    seconds = whole / devices / _NANOSECONDS
    return {
        "trace": str(place),
        "devices": devices,
        "steps": trace.num_steps,
        "seconds": seconds,
        "step_seconds": seconds / trace.num_steps if trace.num_steps else None,
        "shares": _shares(spent, idle, whole, instruction),
        "hidden_collective_share": hidden / whole,
        "layers": _layers(spent, whole, instruction),
        "operations": [
            {
                "name": name,
                "category": instruction(name).category,
                "layer": instruction(name).layer or _UNKNOWN,
                "share": nanoseconds / whole,
                "seconds": nanoseconds / devices / _NANOSECONDS,
                "count": counts[name],
            }
            for name, nanoseconds in sorted(spent.items(), key=lambda item: item[1], reverse=True)[:top]
        ],
        "gaps": _gaps(gaps, trace.phases),
        "memory": _memory(place),
    }


def _shares(
    spent: Mapping[str, float], idle: float, whole: float, instruction: Callable[[str], Instruction]
) -> dict[str, float]:
    shares = dict.fromkeys(CATEGORIES, 0.0)
    for name, nanoseconds in spent.items():
        shares[instruction(name).category] += nanoseconds / whole
    return {**shares, "idle": idle / whole}


def _layers(
    spent: Mapping[str, float], whole: float, instruction: Callable[[str], Instruction]
) -> list[dict[str, Any]]:
    layers: defaultdict[str, float] = defaultdict(float)
    for name, nanoseconds in spent.items():
        layers[instruction(name).layer or _UNKNOWN] += nanoseconds / whole
    return [{"layer": layer, "share": layers[layer]} for layer in sorted(layers, key=layers.__getitem__, reverse=True)]


def _gaps(gaps: list[tuple[float, float]], phases: list[Span]) -> dict[str, Any]:
    gaps = [gap for gap in gaps if gap[1] - gap[0] >= _LEAST_GAP * _NANOSECONDS]
    longest = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:3]
    return {
        "count": len(gaps),
        "seconds": sum(end - start for start, end in gaps) / _NANOSECONDS,
        "longest": [
            {"seconds": (end - start) / _NANOSECONDS, "host": _host_during(start, end, phases)}
            for start, end in longest
        ],
    }


def _host_during(start: float, end: float, phases: list[Span]) -> str:
    """What pax's loop did for the largest part of a gap."""
    overlap: defaultdict[str, float] = defaultdict(float)
    until = bisect.bisect_left([phase.start for phase in phases], end)
    for phase in phases[:until]:
        overlap[phase.name] += max(0.0, min(end, phase.end) - max(start, phase.start))
    longest = max(overlap, key=overlap.__getitem__, default="")
    return longest if overlap[longest] > 0 else "waiting"


def _memory(place: epath.Path) -> dict[str, int]:
    file = place / MEMORY_FILE
    return json.loads(file.read_text()) if file.exists() else {}
