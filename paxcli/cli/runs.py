"""Arguments and options to the recipe or run that they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import paxcli as pax
from paxcli.config.paths import default_run_dir, resolve_path
from paxcli.errors import ConfigError

if TYPE_CHECKING:
    from paxcli.api import Recipe, Run
    from paxcli.mesh.mesh import Mesh


def load_recipe(recipe: str, overlays: Sequence[str] | None, sets: Sequence[str] | None) -> Recipe:
    """The recipe with `--overlay` and `--set` applied."""
    from paxcli.config.resolve import parse_assignments

    return pax.load(recipe, overlays or (), parse_assignments(sets or ()))


def retype_changes(overlays: Sequence[str] | None, sets: Sequence[str] | None) -> list[str]:
    """`--set` and `--overlay` as words of another command line."""
    return [*(f"--set={value}" for value in sets or ()), *(f"--overlay={name}" for name in overlays or ())]


def open_run(target: str, overlays: Sequence[str] | None, sets: Sequence[str] | None, run_dir: str | None) -> Run:
    """The run in a directory, or the run of a recipe."""
    if resolve_path(target).is_dir():
        from paxcli.training.run_dir import RunDir  # here, since it loads JAX

        if run_dir is not None:
            raise ConfigError(f"{target} is a run directory, and so is --run-dir {run_dir}.", "Give one of them.")
        return pax.Run(target, load_recipe(RunDir(target).require_recipe(), overlays, sets))
    return open_recipe(target, overlays, sets, run_dir)


def check_devices(mesh: Mesh, devices: int, slices: int | None, has: str, change: str) -> None:
    """Checks that a recipe's mesh needs all devices of a machine, in as many slices.

    Args:
      mesh: The recipe's mesh.
      devices: How many devices the machine has.
      slices: How many TPU slices they form; None = they are not TPUs.
      has: The number of devices as text, with the machine: `demo has 128 (2 x v4-128)`.
      change: The way to another machine, for the hint.

    Raises:
      ConfigError: It needs another number.
    """
    wanted, parts = mesh.num_devices(), mesh.num_slices()
    hint = f"{change}, or set mesh.ici_mesh_shape and mesh.dcn_mesh_shape."
    if wanted not in (None, devices):
        raise ConfigError(f"The recipe's mesh needs {wanted} devices, but {has}.", hint)
    if slices not in (None, parts):
        raise ConfigError(f"The recipe's mesh has {parts} slice{'s' * (parts > 1)}, not {slices}.", hint)


def open_recipe(recipe: str, overlays: Sequence[str] | None, sets: Sequence[str] | None, run_dir: str | None) -> Run:
    """The run of a recipe, in `run_dir` or the recipe's own directory."""
    loaded = load_recipe(recipe, overlays, sets)
    return pax.Run(default_run_dir(loaded.name) if run_dir is None else run_dir, loaded)
