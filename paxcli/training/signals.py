"""Stopping on request: the first signal asks, the second insists."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


class StopRequest:
    """While entered, SIGINT and SIGTERM ask the run to save and stop; a second one ends the process at once."""

    def __init__(self, announce: Callable[[str], None]):
        """`announce` is told, once, which signal came."""
        self._announce = announce
        self._previous: dict[int, object] = {}
        self.signal_name: str | None = None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_name is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal_name = signal.Signals(number).name
        self._announce(f"Received {self.signal_name}: saving, then stopping. Once more stops at once.")

    def agreed(self, at_sync_point: bool) -> bool:
        """Whether to stop now. Several processes agree at sync points, so that all save the same step."""
        import jax

        if jax.process_count() == 1:
            return self.signal_name is not None
        if not at_sync_point:
            return False
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(self.signal_name is not None).any())
