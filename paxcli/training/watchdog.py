"""Ends a run that hangs."""

from __future__ import annotations

import faulthandler
import threading

from paxcli.errors import Stopped, exit_now

_TICKS = 10


class Watchdog:
    """Prints the stacks of all threads and exits with code 75 if `beat` is not called in time.

    Time is counted in ticks of a thread of this process, so that a suspended process does not time out.
    """

    def __init__(self, seconds: float | None):
        """`seconds`: The longest time between two beats; None = no limit."""
        self._seconds = seconds
        self._ticks = 0
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts to count."""
        if self._seconds is not None:
            threading.Thread(target=self._watch, args=(self._seconds,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ends the count."""
        self._ended.set()

    def beat(self) -> None:
        """Tells that the run is alive."""
        self._ticks = 0

    def _watch(self, seconds: float) -> None:
        while not self._ended.wait(seconds / _TICKS):
            self._ticks += 1
            if self._ticks > _TICKS:
                faulthandler.dump_traceback(all_threads=True)
                message = (
                    f"No step, evaluation batch or save ended in {seconds:g} s. Above are the stacks of all threads."
                )
                exit_now(Stopped(message, "Start it again: it resumes. `step_timeout_seconds` is the limit."))
