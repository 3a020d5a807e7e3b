"""Ends a run that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import threading

from paxcli.errors import Stopped, exit_now

_TICKS = 10


class Watchdog(contextlib.AbstractContextManager):
    """Prints the stacks of all threads and exits with code 75 if its block does not call `beat` in time, or end.

    Time is counted in ticks of a thread of this process, so that a suspended process does not time out.
    """

    def __init__(self, seconds: float | None):
        """`seconds`: The longest time between two beats; None = no limit."""
        self._seconds = seconds

    def __enter__(self) -> Watchdog:
        self._ticks, self._ended = 0, threading.Event()
        if self._seconds is not None:
            arguments = (self._seconds, self._ended)
            threading.Thread(target=self._watch, args=arguments, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def beat(self) -> None:
        """Tells that the run is alive."""
        self._ticks = 0

    def _watch(self, seconds: float, ended: threading.Event) -> None:
        while not ended.wait(seconds / _TICKS):
            self._ticks += 1
            if self._ticks > _TICKS:
                faulthandler.dump_traceback(all_threads=True)
                message = f"No batch, step or save ended in {seconds:g} s. Above are the stacks of all threads."
                exit_now(Stopped(message, "Start it again: it resumes. `step_timeout_seconds` is the limit."))
