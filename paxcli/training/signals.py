"""Stops a run on SIGINT, SIGTERM or SIGHUP: the first signal saves and stops, the second stops at once."""

from __future__ import annotations

import _thread
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_DECISION_SECONDS = 5.0  # between the points at which several processes agree whether to stop


def stop_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM, and SIGHUP, that of a closed terminal, unless it is ignored, as by `nohup`."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


class StopRequest:
    """A context in which `stop_signals` ask the run to save and stop; a second one ends the process at once.

    Python delivers signals to the main thread only: a run in another thread handles none.
    """

    def __init__(self, announce: Callable[[str], None]):
        """`announce` is called once, with a line that names the signal."""
        self._announce = announce
        self._previous: dict[int, object] = {}
        self._pace: dict[str, tuple[int, int, float]] = {}  # of a phase: calls left, calls, and when they began
        self.signal_name: str | None = None

    def __enter__(self) -> StopRequest:
        for number in stop_signals() if threading.current_thread() is threading.main_thread() else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_name is not None:
            if number == signal.SIGHUP:
                return  # the kernel and the shell both send one
            from paxcli.training.progress import in_notebook  # here, since it loads JAX

            if in_notebook():
                raise KeyboardInterrupt  # the kernel and its variables survive
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal_name = signal.Signals(number).name
        text = f"Received {self.signal_name}: saving, then stopping. A second signal stops at once."
        # In a thread, started without locks: the code that this interrupts may hold those of the console or of threads.
        _thread.start_new_thread(self._announce, (text,))

    def should_stop(self, phase: str) -> bool:
        """Whether to stop now. Several processes decide together, every few seconds, so that all save the same step.

        All call this at the same points. Each of them computes the number of calls until the next decision from the
        longest time that a call of this `phase` took in any process.
        """
        import jax

        if jax.process_count() == 1:
            return self.signal_name is not None
        left, calls, began = self._pace.get(phase, (1, 1, -math.inf))
        if left > 1:
            self._pace[phase] = left - 1, calls, began
            return False
        import numpy as np
        from jax.experimental import multihost_utils

        mine = np.array([self.signal_name is not None, (time.monotonic() - began) / calls])
        stops, seconds = multihost_utils.process_allgather(mine).max(axis=0)
        calls = max(1, int(_DECISION_SECONDS / seconds))
        self._pace[phase] = calls, calls, time.monotonic()
        return bool(stops)
