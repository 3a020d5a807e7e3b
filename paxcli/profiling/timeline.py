"""Divides the time of one device among the operations that ran on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paxcli.profiling.trace import Span


class Timeline(NamedTuple):
    """The time of one device, from the start of its first operation to the end of its last, in nanoseconds.

    Attributes:
      shares: Time of each operation, in the order of `spans`. With the gaps they add up to `total`.
      hidden: Time in which collectives ran beside compute; it is in no collective's share.
      gaps: Start and end of each period in which nothing ran.
      total: From the first start to the last end.
    """

    shares: list[float]
    hidden: float
    gaps: list[tuple[float, float]]
    total: float


def divide(spans: Sequence[Span], is_collective: Callable[[str], bool]) -> Timeline:
    """Divides each moment equally among the operations that computed then, or if none did, among the collectives.

    A collective's share is therefore its exposed time: what the step waited for it alone.
    """
    shares = [0.0] * len(spans)
    # At one time, an operation begins before it ends, also if it took no time.
    edges = sorted(edge for i, span in enumerate(spans) for edge in ((span.start, i, False), (span.end, i, True)))
    collective = [is_collective(span.name) for span in spans]
    computing: set[int] = set()
    communicating: set[int] = set()
    hidden, gaps = 0.0, []
    before = edges[0][0]
    for now, i, ends in edges:
        passed = now - before
        if passed > 0:
            running = computing or communicating
            for other in running:
                shares[other] += passed / len(running)
            if computing and communicating:
                hidden += passed
            if not running:
                gaps.append((before, now))
        before = now
        group = communicating if collective[i] else computing
        (group.discard if ends else group.add)(i)
    return Timeline(shares, hidden, gaps, before - edges[0][0])
