"""Reads the metrics of steps back from the device, and measures throughput, without making the device wait."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax

from paxcli.metrics.peaks import mfu

_MAX_IN_FLIGHT = 2  # enough to keep a device busy, and few enough that the host notices failures soon

# What lines of `metrics.jsonl` have besides the metrics of the model and the learner; evaluations have the last six.
RESERVED = {
    *("step", "split", "tokens_per_second", "step_seconds", "mfu", "input_wait_seconds"),
    *("peak_memory_bytes", "seconds_left", "goodput", "storage_retries"),
    *("perplexity", "bits_per_byte", "num_examples", "num_tokens", "num_batches", "data_share"),
}

MetricValue = float | int | None


class Record(NamedTuple):
    """The metrics of one logged step by name. An unknown value is None."""

    step: int
    values: dict[str, MetricValue]


class _Dispatched(NamedTuple):
    """A step that was dispatched to the device."""

    step: int
    metrics: dict[str, jax.Array]
    input_wait_seconds: float
    finished: Future[float]


class _Mark(NamedTuple):
    """When a step finished, and how long the run had been paused until then."""

    step: int
    seconds: float
    paused_seconds: float


@dataclasses.dataclass
class Meter:
    """Measures a run: throughput, MFU and time left at each logged step.

    Steps count from 1. The first step, every `summary_interval_steps`-th and the last are logged. A record is ready
    two steps after its step, or at `flush`, so that the device never waits. Rates cover the window since the previous
    logged step, without pauses. After a restart, the first step only opens the window: compilation is in the rate of
    step 1 only.

    Args:
      flops_per_step: Model FLOPs of a step on all devices; None = unknown.
      tokens_per_step: Tokens of a step on all processes; None for a model without tokens.
      num_train_steps: Number of the last step.
      peak_flops_total: Peak FLOP/s of all devices; None = unknown.
      summary_interval_steps: Steps between logged steps.
    """

    flops_per_step: float | None
    tokens_per_step: int | None
    num_train_steps: int
    peak_flops_total: float | None
    summary_interval_steps: int

    def __post_init__(self) -> None:
        self._clock = ThreadPoolExecutor(1, "meter")
        self._in_flight: deque[_Dispatched] = deque()
        self._records: list[Record] = []
        self._paused_seconds = 0.0
        self._input_wait_seconds = 0.0
        self._first: _Mark | None = None
        self._window = _Mark(0, time.perf_counter(), 0.0)

    def record(self, step: int, device_metrics: dict[str, jax.Array], input_wait_seconds: float) -> list[Record]:
        """Records a step that was just dispatched. Waits only for the step before the previous one.

        Returns:
          The records that became ready, in order.
        """
        if self._first is None and not self._in_flight:
            self._window = self._window._replace(step=step - 1)
        if self._is_logged(step):
            for value in device_metrics.values():
                value.copy_to_host_async()
        finished = self._clock.submit(_finish_time, device_metrics)
        self._in_flight.append(_Dispatched(step, device_metrics, input_wait_seconds, finished))
        return self.flush(_MAX_IN_FLIGHT)

    def flush(self, in_flight: int = 0) -> list[Record]:
        """Waits until at most `in_flight` steps are in flight, and returns the records that are ready."""
        self._finish(in_flight)
        records, self._records = self._records, []
        return records

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes an evaluation or a save from the rates. Waits for the steps in flight first."""
        self._finish(0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - begin

    def idle_seconds(self, since: float) -> float:
        """Seconds from `since` (of `time.perf_counter`) to now in which no step was in flight on the devices."""
        last = self._in_flight[-1].finished if self._in_flight else None
        if last is not None and not last.done():
            return 0.0
        return time.perf_counter() - max(since, last.result() if last is not None else since)

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.summary_interval_steps == 0 or step == self.num_train_steps

    def _finish(self, in_flight: int) -> None:
        """Waits until at most `in_flight` steps are in flight."""
        while len(self._in_flight) > in_flight:
            done = self._in_flight.popleft()
            mark = _Mark(done.step, done.finished.result(), self._paused_seconds)
            self._input_wait_seconds += done.input_wait_seconds
            logged = self._is_logged(done.step)
            if logged:
                self._records.append(Record(done.step, self._measure(done.metrics, mark)))
            if logged or self._first is None:
                self._window, self._input_wait_seconds = mark, 0.0
            self._first = self._first or mark

    def _measure(self, device_metrics: dict[str, jax.Array], mark: _Mark) -> dict[str, MetricValue]:
        steps = mark.step - self._window.step
        paused = mark.paused_seconds - self._window.paused_seconds
        step_seconds = (mark.seconds - self._window.seconds - paused) / steps
        values: dict[str, MetricValue] = {name: value.item() for name, value in jax.device_get(device_metrics).items()}
        return values | {
            "tokens_per_second": _per_second(self.tokens_per_step, step_seconds),
            "step_seconds": step_seconds,
            "mfu": mfu(_per_second(self.flops_per_step, step_seconds), self.peak_flops_total),
            "input_wait_seconds": self._input_wait_seconds / steps,
            "peak_memory_bytes": peak_memory_bytes(),
            "seconds_left": self._seconds_left(mark),
        }

    def _seconds_left(self, mark: _Mark) -> float | None:
        """Extrapolated from the pace since this process's first step, pauses included; None at that step."""
        if self._first is None:
            return None
        pace = (mark.seconds - self._first.seconds) / (mark.step - self._first.step)
        return pace * (self.num_train_steps - mark.step)


def _finish_time(metrics: dict[str, jax.Array]) -> float:
    """Waits for a step. Runs in a thread of its own, so that the time is exact however late the run reads it."""
    jax.block_until_ready(metrics)
    return time.perf_counter()


def _per_second(count: float | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def peak_memory_bytes() -> int:
    """Peak memory of the fullest local device so far, or of this process if devices do not report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if peaks := [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]:
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
