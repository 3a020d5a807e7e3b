"""Orbax's parts with other behavior: handlers of arrays and of the manifest, the commit, and what is logged."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers
from orbax.checkpoint.path import atomicity

from paxcli.checkpoint.manifest import MANIFEST_FILE, to_json
from paxcli.config.paths import rename_durably


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


class ManifestHandler(ocp.JsonCheckpointHandler):
    """Orbax's handler of JSON, for a function that returns the manifest, since its fingerprints take a while."""

    async def async_save(self, directory: epath.Path, item: Any = None, args: Any = None) -> list[Any]:
        """Starts to write the manifest that `args.item()` returns."""

        async def write() -> None:
            if jax.process_index() == 0:
                (directory / MANIFEST_FILE).write_text(json.dumps(to_json(args.item())))

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="manifest")]


class DurableRename(atomicity.AtomicRenameTemporaryPath):
    """Orbax's commit by rename, with all files flushed to the disk before the rename, and the rename after it.

    Orbax writes its last files in `finalize`, so that one renames to another temporary name.
    """

    async def finalize(self) -> None:
        """Commits the checkpoint."""
        final = self._final_path
        written = self._final_path = epath.Path(f"{self._tmp_path}-written")
        await super().finalize()
        self._final_path = final
        await asyncio.to_thread(rename_durably, written, final)


@functools.cache
def silence_writes() -> None:
    """From now on, the other writes of a failed save print nothing: Orbax raises the first error, and they continue."""
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
