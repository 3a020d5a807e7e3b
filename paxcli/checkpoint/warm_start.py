"""Initializes parameters from another run's checkpoint: `--from RUN_DIR[@STEP]`."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import jax
from etils import epath

from paxcli.checkpoint.array_differences import ArrayDifferences, compare_arrays
from paxcli.checkpoint.manager import CheckpointStore, find_step, format_steps
from paxcli.checkpoint.reading import listing, named_leaves, read_arrays, read_manifest
from paxcli.errors import ConfigError, DataError
from paxcli.mesh.startup import agree


class Report(NamedTuple):
    """The result of a warm start.

    Args:
      source: The checkpoint's directory.
      arrays: Its arrays compared with the model's. Those that match were loaded.
    """

    source: epath.Path
    arrays: ArrayDifferences

    def text(self) -> str:
        """A summary of several lines, without empty categories."""
        arrays = self.arrays
        categories = {
            "Not in the checkpoint, randomly initialized": listing(arrays.missing),
            "Another shape or dtype, randomly initialized": "; ".join(arrays.mismatched.values()),
            "In the checkpoint, not used": listing(arrays.unexpected),
        }
        lines = [f"{category}: {text}." for category, text in categories.items() if text]
        return "\n".join([f"Loaded {len(arrays.matched)} arrays from {self.source}.", *lines])


def parse_source(text: str) -> tuple[str, int | None]:
    """Parses `RUN_DIR` or `RUN_DIR@STEP` into a directory and a step, if any."""
    run_dir, at, step = text.rpartition("@")
    if not at or "/" in step:
        return text, None
    if not step.isdigit():
        raise ConfigError(f"`{text}`: `{step}` is not a step.", "Write --from RUN_DIR or --from RUN_DIR@STEP.")
    return run_dir, int(step)


def load_params(
    run_dir: str | os.PathLike[str], step: int | None, state: Any, what: Literal["params", "all"] = "params"
) -> tuple[Any, Report]:
    """Replaces the arrays of `state` by those of the same name, shape and dtype in another run's checkpoint.

    Args:
      run_dir: The other run's directory.
      step: One of its steps; None: the latest.
      state: The initialized parameters ("params") or the full train state ("all"), sharded over the mesh.
      what: Which part of the checkpoint `state` is.

    Returns:
      A tree like `state`, and a report. Arrays are never reshaped or cast; those that do not match are left unchanged.

    Raises:
      DataError: The checkpoint does not exist or is damaged, or none of its arrays match.
    """
    store = CheckpointStore(epath.Path(run_dir) / "checkpoints")
    step_dir = store.directory / str(agree(find_step(run_dir, step)))  # the run may save another one meanwhile
    prefix = "params." if what == "params" else ""
    leaves = {prefix + name: leaf for name, leaf in named_leaves(state).items()}
    try:
        manifest = read_manifest(step_dir)
        saved = {name: entry for name, entry in manifest.arrays.items() if name.startswith(prefix)}
        report = Report(step_dir, compare_arrays(leaves, saved))
        matching = {name: leaves[name] for name in report.arrays.matched}
        loaded = read_arrays(step_dir, manifest, matching) if matching else {}
    except DataError as error:
        others = format_steps([other for other in store.steps() if str(other) != step_dir.name])
        hint = f"Its other checkpoints: {others}. `--step`, or `--from {run_dir}@STEP`, names one."
        raise DataError(f"The checkpoint {step_dir} is unusable: {error.message}.", hint) from error
    if not loaded:
        raise DataError(f"No array in {step_dir} matches this model.", report.text())
    merged = [loaded.get(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(state), merged), report
