"""SIGINT and SIGTERM end a command with exit code 130 or 143, wherever they arrive."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 5.0  # for clean-up; also when a library does not return
_OWN_PACKAGES = {"__main__", "paxcli", "typer", "click"} | sys.stdlib_module_names


class Interrupts:
    """Handles the signals of one process.

    The first raises KeyboardInterrupt in the main thread, where pax or Python's own library runs. Inside another
    library, which may have called Python from C++ and crash at an exception, it ends the process at once, without
    clean-up. So do a second signal, and some seconds without an end, also in C++ that does not return.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._report: Callable[[int], object] = lambda code: None
        self._catching: set[str] = set()  # of `handler` and `thread`, which both see each signal

    def install(self, report: Callable[[int], object]) -> None:
        """Replaces the handlers of SIGINT and SIGTERM, and delays both until `release`.

        `report` is called with the exit code before a forced exit.
        """
        self.hold()
        self._report = report
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._exit_if_busy, args=(reader,), daemon=True).start()
        sys.unraisablehook = functools.partial(self._exit_if_lost, sys.unraisablehook)
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def hold(self) -> None:
        """Delays signals until `release`, also in a program that replaces this one: `exec` drops handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def release(self) -> None:
        """Delivers signals from here on: KeyboardInterrupt is caught."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def restore(self) -> None:
        """Restores Python's own handlers, for a command that asks the user what Ctrl-C means."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextlib.contextmanager
    def catch_first(self, is_wanted: bool) -> Iterator[Callable[[], bool]]:
        """If wanted, the first Ctrl-C inside does not end the process. Yields a function: whether it has come."""
        self._catching = {"handler", "thread"} if is_wanted else set()
        try:
            yield lambda: is_wanted and "handler" not in self._catching
        finally:
            self._catching.discard("handler")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and "handler" in self._catching:
            return self._catching.remove("handler")
        if self.exit_code is not None:
            os._exit(128 + number)
        self.exit_code = 128 + number
        if _in_another_library(frame):
            self._force_exit()
        raise KeyboardInterrupt

    def _exit_if_busy(self, signals: int) -> None:
        """Ends the process some seconds after a signal, from a thread: Python's handlers wait until C++ returns."""
        while True:
            number = os.read(signals, 1)[0]
            if number == signal.SIGINT and "thread" in self._catching:
                self._catching.remove("thread")
            elif signal.getsignal(number) == self._handle:  # not that of a run, which saves first
                time.sleep(_GRACE_SECONDS)
                self.exit_code = self.exit_code or 128 + number
                self._force_exit()

    def _exit_if_lost(self, hook: Callable[[Any], object], unraisable: Any) -> None:
        """An unraisable hook: Python drops an exception that a callback raises, such as JAX's at garbage collection."""
        if unraisable.exc_type is KeyboardInterrupt:
            self._force_exit()
        hook(unraisable)

    def _force_exit(self) -> None:
        try:
            self._report(self.exit_code or 1)
        finally:
            os._exit(self.exit_code or 1)


def _in_another_library(frame: FrameType | None) -> bool:
    packages = (one.f_globals.get("__name__", "").partition(".")[0] for one, _ in traceback.walk_stack(frame))
    return not _OWN_PACKAGES.issuperset(packages)


interrupts = Interrupts()
