"""How a peer talks to a benchmark: its task as JSON in the last argument, counts on stdin, seconds on stdout."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable

Step = Callable[[], None]


class TokenCounter:
    """Counts the tokens of batches, without padding."""

    def __init__(self) -> None:
        self._num_tokens = self._num_batches = 0

    def add(self, num_tokens: int) -> None:
        """Counts a batch."""
        self._num_tokens += num_tokens
        self._num_batches += 1

    def per_step(self) -> float:
        """The mean of the batches."""
        return self._num_tokens / self._num_batches


def serve(make_step: Callable[[dict], tuple[Step, Step]], counter: TokenCounter | None = None) -> None:
    """Takes the first step, then as many as asked for, until asked for none.

    A count of 5 times each of five steps alone; one of -5 times five steps that are begun one after the other.

    Args:
      make_step: From the task to two functions: one begins a step, the other waits for all that are begun.
      counter: Counts the tokens of each step.
    """
    step, wait = make_step(json.loads(sys.argv[-1]))

    def seconds_of(count: int) -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - began) / count, (time.process_time() - used) / count

    seconds_of(1)
    _answer(first_step_seconds=since_process_start())
    seconds_of(1)
    for line in sys.stdin:
        count = int(line)
        if count == 0:
            break
        timed = [seconds_of(1) for _ in range(count)] if count > 0 else [seconds_of(-count)]
        seconds, cpu_seconds = zip(*timed, strict=True)
        _answer(seconds=seconds, cpu_seconds=cpu_seconds)
    _answer(
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        gpu_memory_bytes=_gpu_memory(),
        tokens_per_step=counter.per_step() if counter else None,
    )


def _gpu_memory() -> int | None:
    """The most that PyTorch or JAX had allocated on the GPU, if this process used one."""
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if (jax := sys.modules.get("jax")) and jax.default_backend() == "gpu":
        return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    return None


def _answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


def since_process_start() -> float:
    """Seconds that this process has lived."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        started = int(stat.read().rpartition(")")[2].split()[19]) / 100  # field 22, in clock ticks since boot
        return float(uptime.read().split()[0]) - started
