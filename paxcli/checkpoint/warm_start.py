"""Initializes parameters from another run's checkpoint: `--from RUN_DIR[@STEP]`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import jax
from etils import epath

from paxcli.checkpoint.array_differences import compare_arrays
from paxcli.checkpoint.manager import CheckpointStore, format_steps
from paxcli.checkpoint.reading import listing, named_leaves, read_arrays, read_manifest
from paxcli.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a warm start, by array name.

    Args:
      source: The checkpoint's directory.
      matched: Arrays that were loaded.
      missing: Arrays of the model that the checkpoint lacks.
      unused: Arrays of the checkpoint that the model does not have.
      mismatched: Descriptions of the arrays with another shape or dtype in the checkpoint.
    """

    source: str
    matched: list[str]
    missing: list[str]
    unused: list[str]
    mismatched: list[str]

    def text(self) -> str:
        """A summary of several lines, without empty categories."""
        lines = [f"Loaded {len(self.matched)} arrays from {self.source}."]
        if self.missing:
            lines.append(f"Not in the checkpoint, randomly initialized: {listing(self.missing)}.")
        if self.mismatched:
            lines.append(f"Another shape or dtype, randomly initialized: {'; '.join(self.mismatched)}.")
        if self.unused:
            lines.append(f"In the checkpoint, not used: {listing(self.unused)}.")
        return "\n".join(lines)


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
    steps = store.steps()
    chosen = step if step is not None else store.latest_step()
    if chosen not in steps:
        wanted_step = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise DataError(f"{run_dir} has no {wanted_step}.", f"Steps there: {format_steps(steps)}.")
    step_dir = store.directory / str(chosen)
    prefix = "params." if what == "params" else ""
    leaves = {prefix + name: leaf for name, leaf in named_leaves(state).items()}
    try:
        manifest = read_manifest(step_dir)
        differences = compare_arrays(leaves, manifest.arrays)
        matching = {name: leaves[name] for name in differences.matched}
        loaded = read_arrays(step_dir, manifest, matching) if matching else {}
    except DataError as error:
        hint = f"Steps there: {format_steps(steps)}; choose one with --from {run_dir}@STEP."
        raise DataError(f"The checkpoint {step_dir} is unusable: {error.message}.", hint) from error
    report = Report(
        source=str(step_dir),
        matched=list(loaded),
        missing=differences.missing,
        unused=[name for name in differences.unexpected if name.startswith(prefix)],
        mismatched=list(differences.mismatched.values()),
    )
    if not loaded:
        raise DataError(f"No array in {step_dir} matches this model.", report.text())
    merged = [loaded.get(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(state), merged), report
