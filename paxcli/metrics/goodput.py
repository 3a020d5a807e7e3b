"""Goodput: accounts for the wall time of a run by cause, over all its restarts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from paxcli.config.paths import read_json, replace_text
from paxcli.errors import DataError, first_line
from paxcli.log import log

# The causes, in the order in which they are printed. Only the first is progress.
CAUSES = ("step", "input_wait", "start_up", "compile", "restore", "eval", "save", "lost", "stopped")
STEP, INPUT_WAIT, START_UP, COMPILE, RESTORE, EVAL, SAVE, LOST, STOPPED = CAUSES


class Goodput:
    """Accounts for the wall time of one start of a run, and adds it to that of the earlier starts in `goodput.json`.

    The time goes to one cause at a time: the one that the main thread works on. Steps that this start has to repeat
    move from `step` to `lost`, by their share of the steps of the start that computed them first. A thread writes the
    file every two seconds, in a bucket every minute: after a kill, the time since then counts as stopped.

    Args:
      directory: The run directory; None on the processes of a job that write nothing.
      resume_step: The step that this start is expected to resume from; 0 in a new run.

    Attributes:
      first_step: The step that it resumes from. Steps after it, of earlier starts, are lost.
      step: The last step that was dispatched.
    """

    _is_first_in_process = True

    def __init__(self, directory: epath.Path | None, resume_step: int):
        self._path = directory / "goodput.json" if directory is not None else None
        self._earlier = _read_starts(self._path) if self._path is not None else []
        ended = self._earlier[-1]["ended"] if self._earlier else 0.0
        now = time.time()
        self._began = max(now - (process_age() if Goodput._is_first_in_process else 0.0), ended)
        Goodput._is_first_in_process = False
        self._cause, self._since = START_UP, time.perf_counter() - max(now - self._began, 0.0)
        self._seconds = dict.fromkeys(CAUSES, 0.0) | {STOPPED: self._began - ended if ended else 0.0}
        self.first_step = self.step = resume_step
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._write_regularly, name="goodput", daemon=True)

        self._thread.start()

    def close(self) -> None:
        """Writes the file a last time."""
        self._closed.set()
        self._thread.join()
        self._write()

    @contextlib.contextmanager
    def time(self, cause: str) -> Iterator[None]:
        """Counts the time of a block as `cause`."""
        before = self._cause
        self.switch(cause)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, cause: str) -> None:
        """Counts the time from now on as `cause`."""
        with self._lock:
            now = time.perf_counter()
            self._seconds[self._cause] += now - self._since
            self._cause, self._since = cause, now

    def add_input_wait(self, seconds: float) -> None:
        """Moves time in which the devices had to wait for a batch from `step` to `input_wait`."""
        with self._lock:
            self._seconds[STEP] -= seconds
            self._seconds[INPUT_WAIT] += seconds

    def report(self) -> dict[str, Any]:
        """`goodput` (share of the wall time), `wall_seconds`, `seconds` by cause, and the same of each of `starts`."""
        with self._lock:
            seconds = self._seconds | {self._cause: self._seconds[self._cause] + time.perf_counter() - self._since}
        ended = self._began + sum(seconds.values()) - seconds[STOPPED]
        steps = {"first_step": self.first_step, "last_step": self.step}
        this: dict[str, Any] = {"began": self._began, "ended": ended, **steps, "seconds": seconds}
        starts = [*(_until(self.first_step, start) for start in self._earlier), this]
        total = {cause: sum(start["seconds"][cause] for start in starts) for cause in CAUSES}
        wall = sum(total.values())
        return {"goodput": total[STEP] / wall, "wall_seconds": wall, "seconds": total, "starts": starts}

    def text(self) -> str:
        """One line: the goodput, and the share of every other cause that is not negligible."""
        report = self.report()
        wall, seconds = report["wall_seconds"], report["seconds"]
        others = [f"{cause} {seconds[cause] / wall:.1%}" for cause in CAUSES[1:] if seconds[cause] >= 0.0005 * wall]
        return " · ".join([f"goodput {report['goodput']:.1%} of {wall:,.0f} s", *others])

    def _write_regularly(self) -> None:
        while not self._closed.wait(60.0 if "://" in os.fspath(self._path or "") else 2.0):
            self._write()

    def _write(self) -> None:
        """Writes the file. A failure is only logged, since the run can do without its accounts."""
        if self._path is not None:
            try:
                replace_text(self._path, json.dumps(self.report(), indent=1) + "\n")
            except Exception as error:  # each file system raises its own types
                log.warning("The accounts of the run's wall time are not written: %s", first_line(error))


def _until(step: int, start: dict[str, Any]) -> dict[str, Any]:
    """An earlier start, with the time of its steps after `step` moved from `step` to `lost`."""
    seconds, steps = start["seconds"], start["last_step"] - start["first_step"]
    kept = max(start["first_step"], min(start["last_step"], step))
    lost = seconds[STEP] * (start["last_step"] - kept) / max(steps, 1)
    return start | {"last_step": kept, "seconds": seconds | {STEP: seconds[STEP] - lost, LOST: seconds[LOST] + lost}}


def _read_starts(path: epath.Path) -> list[dict[str, Any]]:
    """The starts in the file; an empty list if the file is missing or damaged. Damage is logged."""
    try:
        starts = read_json(path)["starts"] if path.exists() else []
        for start in [_until(0, start) for start in starts]:
            sum([*(start["seconds"][cause] for cause in CAUSES), start["began"], start["ended"]])  # numbers, all there
        return starts
    except (DataError, ArithmeticError, KeyError, TypeError):
        log.warning("%s is damaged: the accounts of the run's wall time start again.", path)
        return []


def process_age() -> float:
    """Seconds since this process started, on Linux. 0 elsewhere, and in a notebook, whose kernel outlives its runs."""
    if sys.platform != "linux" or "ipykernel" in sys.modules:
        return 0.0
    started = epath.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # clock ticks since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
