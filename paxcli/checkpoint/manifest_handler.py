"""Writes the manifest of a checkpoint in the background, while Orbax writes the arrays."""

from __future__ import annotations

import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from paxcli.checkpoint.manifest import to_json
from paxcli.checkpoint.reading import MANIFEST_FILE


class ManifestHandler(ocp.JsonCheckpointHandler):
    """Orbax's handler of JSON, for a function that returns the manifest, since its fingerprints take a while."""

    async def async_save(self, directory: epath.Path, item: Any = None, args: Any = None) -> list[Any]:
        """Starts to write the manifest that `args.item()` returns."""

        async def write() -> None:
            if jax.process_index() == 0:
                (directory / MANIFEST_FILE).write_text(json.dumps(to_json(args.item())))

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="manifest")]
