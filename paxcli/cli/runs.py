"""Arguments and options to the recipe or run that they name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import paxcli as pax
from paxcli.config.paths import default_run_dir, resolve_path
from paxcli.errors import ConfigError

Words = Sequence[str] | None


def load_recipe(recipe: str, overlays: Words, sets: Words) -> pax.Recipe:
    """The recipe with `--overlay` and `--set` applied."""
    from paxcli.config.resolve import parse_assignments

    return pax.load(recipe, overlays or (), parse_assignments(sets or ()))


def recipe_files(path: Path) -> Iterator[Path]:
    """The local files of a recipe that was loaded from a file.

    They are the file, those that a YAML recipe names relative to its directory, and the modules that a Python recipe
    imported from its directory.
    """
    from paxcli.config.overlay import YAML_SUFFIXES, read_yaml_recipe

    yield path
    if path.suffix in YAML_SUFFIXES:
        base, overlays, _ = read_yaml_recipe(path)
        for name in (base, *overlays):
            file = (path.parent / name.partition(":")[0]).resolve()
            if file.suffix in (".py", *YAML_SUFFIXES) and not Path(name).is_absolute() and file.is_file():
                yield from recipe_files(file) if name is base else [file]
    for name, module in list(sys.modules.items()):
        place, source = path.parent.joinpath(*name.split(".")), str(getattr(module, "__file__", None))
        if path.suffix == ".py" and source in (f"{place}.py", f"{place}/__init__.py") and not name.startswith("paxcli"):
            yield Path(source)


def retype_changes(overlays: Words, sets: Words) -> list[str]:
    """`--set` and `--overlay` as words of another command line."""
    return [*(f"--set={value}" for value in sets or ()), *(f"--overlay={name}" for name in overlays or ())]


def open_run(target: str, overlays: Words, sets: Words, run_dir: str | None) -> pax.Run:
    """The run in a directory, or the run of a recipe."""
    if resolve_path(target).is_dir():
        from paxcli.training.run_dir import RunDir  # here, since it loads JAX

        if run_dir is not None:
            raise ConfigError(f"{target} is a run directory, and so is --run-dir {run_dir}.", "Give one of them.")
        return pax.Run(target, load_recipe(RunDir(target).require_recipe(), overlays, sets))
    return open_recipe(target, overlays, sets, run_dir)


def check_devices(recipe: pax.Recipe, devices: int, slices: int | None, has: str, change: str) -> None:
    """Checks that a recipe's mesh needs all devices of a machine, in as many slices.

    Args:
      recipe: The recipe.
      devices: How many devices the machine has.
      slices: How many TPU slices they form; None = they are not TPUs.
      has: The number of devices as text, with the machine: `demo has 128 (2 x v4-128)`.
      change: The way to another machine, for the hint.

    Raises:
      ConfigError: It needs another number.
    """
    import fiddle as fdl

    mesh = fdl.build(recipe.config.mesh)
    wanted, parts = mesh.num_devices(), mesh.num_slices()
    hint = f"{change}, or set mesh.ici_mesh_shape and mesh.dcn_mesh_shape."
    if wanted not in (None, devices):
        raise ConfigError(f"The recipe's mesh needs {wanted} devices, but {has}.", hint)
    if slices not in (None, parts):
        raise ConfigError(f"The recipe's mesh has {parts} slice{'s' * (parts > 1)}, not {slices}.", hint)


def open_recipe(recipe: str, overlays: Words, sets: Words, run_dir: str | None) -> pax.Run:
    """The run of a recipe, in `run_dir` or the recipe's own directory."""
    loaded = load_recipe(recipe, overlays, sets)
    return pax.Run(default_run_dir(loaded.name) if run_dir is None else run_dir, loaded)
