"""How a peer talks to the benchmark: a count on stdin, seconds on stdout."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable


def serve(make_step: Callable[[dict], Callable[[], None]]) -> None:
    """Takes the first step, then as many as asked for, until asked for none.

    Args:
      make_step: From the size to a function that takes one step and waits for it.
    """
    step = make_step(json.loads(sys.argv[-1]))
    step()
    _answer(first_step_seconds=since_process_start())
    step()
    for line in sys.stdin:
        if int(line) == 0:
            break
        seconds = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        _answer(seconds=seconds)
    _answer(peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


def since_process_start() -> float:
    """Seconds that this process has lived."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rpartition(")")[2].split()[19]) / 100  # field 22, in clock ticks since boot
        return float(uptime.read().split()[0]) - started
