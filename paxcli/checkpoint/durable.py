"""A commit of checkpoints that survives a power failure: all files are on disk before the rename that commits."""

from __future__ import annotations

import asyncio

from etils import epath
from orbax.checkpoint import path as ocp_path

from paxcli.config.paths import rename_durably


class DurableRename(ocp_path.atomicity.AtomicRenameTemporaryPath):
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
