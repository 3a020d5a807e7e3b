"""How the time of one device divides over what ran on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paxcli.profiling.trace import Span


class Timeline(NamedTuple):
    """The time of one device, from the begin of its first operation to the end of its last. Times are nanoseconds.

    Attributes:
      shares: What each operation has of it, in the order of `spans`. With `idle` they add up to the whole.
      hidden: What collectives ran while something else computed; it is in no operation's share.
      idle: When nothing ran.
      gaps: Begin and end of each time when nothing ran.
      whole: All of it.
    """

    shares: list[float]
    hidden: float
    idle: float
    gaps: list[tuple[float, float]]
    whole: float


def divide(spans: Sequence[Span], is_collective: Callable[[str], bool]) -> Timeline:
    """Gives each moment to what ran then: in equal parts to what computed, else to collectives, else to nobody.

    So a collective has what the step waited for it alone: its exposed time.
    """
    shares = [0.0] * len(spans)
    edges = sorted(
        [(span.start, True, i) for i, span in enumerate(spans)] + [(s.end, False, i) for i, s in enumerate(spans)]
    )
    collective = [is_collective(span.name) for span in spans]
    computing: set[int] = set()
    communicating: set[int] = set()
    hidden = idle = 0.0
    gaps = []
    before = edges[0][0]
    for now, begins, i in edges:
        passed = now - before
        if passed > 0:
            running = computing or communicating
            for other in running:
                shares[other] += passed / len(running)
            if computing and communicating:
                hidden += passed
            if not running:
                idle += passed
                gaps.append((before, now))
        before = now
        group = communicating if collective[i] else computing
        (group.add if begins else group.discard)(i)
    return Timeline(shares, hidden, idle, gaps, before - edges[0][0])
