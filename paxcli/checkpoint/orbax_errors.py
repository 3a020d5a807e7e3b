"""Keeps Orbax from printing: it raises the first error of a save or restore. Its other reads and writes continue."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import type_handlers


class ArrayHandler(type_handlers.ArrayHandler):
    """Orbax's handler of `jax.Array`, which waits for the other reads when one fails.

    Orbax closes the loop at the first failure, and each read that ends later would print a stack trace.
    """

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Reads the arrays of `infos`."""
        earlier = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        finally:
            await asyncio.gather(*(asyncio.all_tasks() - earlier), return_exceptions=True)


@functools.cache
def silence_writes() -> None:
    """From now on, the other writes of a failed save print nothing."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_not_orbax_error)
    sys.unraisablehook = functools.partial(_ignore_late_writes, sys.unraisablehook)


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
    """A log filter: Orbax, or asyncio for it, logs the stack trace of each failed write."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname + record.getMessage()


def _ignore_late_writes(hook: Callable[[Any], object], unraisable: Any) -> None:
    """An unraisable hook: a write that ends after another has failed finds its event loop closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)
