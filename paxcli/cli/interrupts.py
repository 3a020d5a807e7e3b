"""SIGINT and SIGTERM end a command with exit code 130 or 143, wherever they arrive."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_GRACE_SECONDS = 5.0  # for clean-up; also when the exception was lost in a callback, or a library does not return


class Interrupts:
    """Handles the signals of one process.

    The first raises KeyboardInterrupt in the main thread. If the process still runs after some seconds, it ends without
    clean-up, as after a second signal.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._report: Callable[[int], object] = lambda code: None

    def install(self, report: Callable[[int], object]) -> None:
        """Replaces the handlers of SIGINT and SIGTERM. `report` is called with the exit code before a forced exit."""
        self._report = report
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restores Python's own handlers, for a command that asks the user what Ctrl-C means."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.exit_code is not None:
            os._exit(128 + number)
        self.exit_code = 128 + number
        timer = threading.Timer(_GRACE_SECONDS, self._force_exit)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    def _force_exit(self) -> None:
        try:
            self._report(self.exit_code or 1)
        finally:
            os._exit(self.exit_code or 1)


interrupts = Interrupts()
