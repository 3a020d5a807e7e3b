"""Summarizes the time of traced steps by kind of work, layer and operation, and the gaps in which devices waited."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from paxcli.errors import DataError, first_line
from paxcli.profiling.timeline import divide
from paxcli.profiling.trace import Span, find_trace, read_trace
from paxcli.programs.attribution import CATEGORIES, Attribution, attribute_instructions, attribute_name
from paxcli.programs.hlo import read_program

HLO_FILE = "train_step.hlo.txt"
MEMORY_FILE = "memory.json"

_NANOSECONDS = 1e9
_MIN_GAP = 1e-5  # seconds; shorter gaps are the overhead of launching an operation
_UNKNOWN = "(not known)"


def summarize(directory: str, top: int = 10) -> dict[str, Any]:
    """Summarizes the newest trace of a run directory, or the trace of the directory.

    Returns:
      `trace`: its directory.
      `devices` and `steps`: their numbers.
      `seconds`, `step_seconds`: traced on each device, and for each step.
      `shares`: of that time by kind of work; they add up to 1. Collectives count only while nothing else ran.
      `hidden_collective_share`: collectives that ran beside other work.
      `layers`, `operations`: their shares, longest first; the `top` operations only.
      `gaps`: `count` and `seconds` of the gaps in which devices waited, and what the host did in the `longest`.
      `memory`: bytes that the step's program needs, and the most that was in use.

    Raises:
      DataError: There is no trace, it is empty, or a file beside it is damaged.
    """
    trace_directory = find_trace(directory)
    trace = read_trace(trace_directory)
    hlo, memory = trace_directory / HLO_FILE, trace_directory / MEMORY_FILE
    try:
        known = attribute_instructions(read_program(hlo.read_text())) if hlo.exists() else {}
        needed = json.loads(memory.read_text() if memory.exists() else "{}")
        sizes = {name: int(float(size)) for name, size in needed.items()}
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{hlo} or {memory.name} is damaged: {first_line(error)}", "Move it away.") from error
    known = {re.sub(r"[.-]", "_", name): found for name, found in known.items()} | known  # names of kernels, too

    def attribution(name: str) -> Attribution:
        return known.get(name) or attribute_name(name.rpartition("/")[2])

    spent: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    gaps: list[tuple[float, float]] = []
    total = hidden = 0.0
    for spans in trace.operations.values():
        spans = [span for span in spans if attribution(span.name).category != "control"]
        timeline = divide(spans, lambda name: attribution(name).category == "collective")
        for span, share in zip(spans, timeline.shares, strict=True):
            spent[span.name] += share
            counts[span.name] += 1
        total, hidden = total + timeline.total, hidden + timeline.hidden
        gaps += timeline.gaps
    devices = len(trace.operations)
    seconds = total / devices / _NANOSECONDS
    layers = _shares(spent, total, lambda name: attribution(name).layer or _UNKNOWN)
    return {
        "trace": str(trace_directory),
        "devices": devices,
        "steps": trace.num_steps,
        "seconds": seconds,
        "step_seconds": seconds / trace.num_steps if trace.num_steps else None,
        "shares": dict.fromkeys(CATEGORIES, 0.0)
        | _shares(spent, total, lambda name: attribution(name).category)
        | {"idle": sum(end - start for start, end in gaps) / total},
        "hidden_collective_share": hidden / total,
        "layers": [{"layer": layer, "share": share} for layer, share in layers.items()],
        "operations": [
            {
                "name": name,
                "category": attribution(name).category,
                "layer": attribution(name).layer or _UNKNOWN,
                "share": nanoseconds / total,
                "seconds": nanoseconds / devices / _NANOSECONDS,
                "count": counts[name],
            }
            for name, nanoseconds in sorted(spent.items(), key=lambda item: item[1], reverse=True)[:top]
        ],
        "gaps": _gaps(gaps, trace.phases),
        "memory": sizes,
    }


def _shares(spent: Mapping[str, float], total: float, group_of: Callable[[str], str]) -> dict[str, float]:
    """Share of the time by group of operations, longest first."""
    shares: defaultdict[str, float] = defaultdict(float)
    for name, nanoseconds in spent.items():
        shares[group_of(name)] += nanoseconds / total
    return dict(sorted(shares.items(), key=lambda item: item[1], reverse=True))


def _gaps(gaps: list[tuple[float, float]], phases: list[Span]) -> dict[str, Any]:
    gaps = [gap for gap in gaps if gap[1] - gap[0] >= _MIN_GAP * _NANOSECONDS]
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
    """The phase of the training loop that took most of a gap."""
    overlap: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        overlap[phase.name] += max(0.0, min(end, phase.end) - max(start, phase.start))
    longest = max(overlap, key=overlap.__getitem__, default="")
    return longest if overlap[longest] > 0 else "waiting"
