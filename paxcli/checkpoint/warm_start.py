"""Starts a run from the weights of another: `--from RUN_DIR[@STEP]`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import jax
from etils import epath

from paxcli.checkpoint.array_differences import compare_arrays
from paxcli.checkpoint.manager import CheckpointStore, listing_of_steps
from paxcli.checkpoint.reading import listing, named_leaves, read_arrays, read_manifest
from paxcli.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Report:
    """What a warm start took, by array name.

    Args:
      source: The checkpoint.
      matched: Taken from it.
      missing: Wanted, and not there.
      unused: There, and not wanted.
      mismatched: There with another shape or dtype, with both spelled out.
    """

    source: str
    matched: list[str]
    missing: list[str]
    unused: list[str]
    mismatched: list[str]

    def text(self) -> str:
        """For people: one line for each kind that is not empty."""
        lines = [f"From {self.source}: {len(self.matched)} arrays taken."]
        if self.missing:
            lines.append(f"Not there, so left as initialized: {listing(self.missing)}.")
        if self.mismatched:
            lines.append(f"Of another shape or type, so left as initialized: {'; '.join(self.mismatched)}.")
        if self.unused:
            lines.append(f"There, but not used: {listing(self.unused)}.")
        return "\n".join(lines)


def parse_source(text: str) -> tuple[str, int | None]:
    """`RUN_DIR` or `RUN_DIR@STEP`."""
    run_dir, at, step = text.rpartition("@")
    if not at or "/" in step:
        return text, None
    if not step.isdigit():
        raise ConfigError(f"`{text}`: `{step}` is not a step.", "Write --from RUN_DIR or --from RUN_DIR@STEP.")
    return run_dir, int(step)


def load_params(
    run_dir: str | os.PathLike[str], step: int | None, state: Any, what: Literal["params", "all"] = "params"
) -> tuple[Any, Report]:
    """Puts the arrays of another run's checkpoint in the place of those of `state` that have their name and shape.

    Args:
      run_dir: The other run's directory.
      step: One of its steps; None is the newest.
      state: The initialized parameters (for "params") or the whole state (for "all"), placed on the mesh.
      what: Which part of the checkpoint `state` is.

    Returns:
      A tree like `state`, and what was taken. Nothing is reshaped or cast: what does not fit stays as it is.

    Raises:
      DataError: There is no such checkpoint, it is damaged, or nothing in it fits.
    """
    store = CheckpointStore(epath.Path(run_dir) / "checkpoints")
    steps = store.steps()
    chosen = step if step is not None else store.latest_step()
    if chosen not in steps:
        wanted_step = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise DataError(f"{run_dir} has no {wanted_step}.", f"Steps there: {listing_of_steps(steps)}.")
    step_dir, prefix = store.directory / str(chosen), "params." if what == "params" else ""
    leaves = {prefix + name: leaf for name, leaf in named_leaves(state).items()}
    try:
        manifest = read_manifest(step_dir)
        differences = compare_arrays(leaves, manifest.arrays)
        fits = {name: leaves[name] for name in differences.matched}
        taken = read_arrays(step_dir, manifest, fits) if fits else {}
    except DataError as error:
        hint = f"Steps there: {listing_of_steps(steps)}; choose one with --from {run_dir}@STEP."
        raise DataError(f"The checkpoint {step_dir} is unusable: {error.message}.", hint) from error
    report = Report(
        source=str(step_dir),
        matched=list(taken),
        missing=differences.missing,
        unused=[name for name in differences.unexpected if name.startswith(prefix)],
        mismatched=list(differences.mismatched.values()),
    )
    if not taken:
        raise DataError(f"Nothing in {step_dir} fits this model.", report.text())
    merged = [taken.get(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(state), merged), report
