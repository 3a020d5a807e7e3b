"""Arguments and options to the recipe or run that they name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

import paxcli as pax
from paxcli.config.paths import default_run_dir, resolve_path
from paxcli.errors import ConfigError, MissingError

Words = Sequence[str] | None

# Prefix of a Hugging Face directory, or of a model on the hub, where a run or a recipe may be named.
HF = "hf:"


def load_recipe(recipe: str, overlays: Words, sets: Words) -> pax.Recipe:
    """The recipe, or that of a Hugging Face model's config.json, with `--overlay` and `--set` applied."""
    from paxcli.config.resolve import parse_assignments

    values = parse_assignments(sets or ())
    if not recipe.startswith(HF):
        return pax.load(recipe, overlays or (), values)
    from paxcli.convert.huggingface.weights import recipe_of

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{model_name(recipe)}.yaml")
        file.write_text(recipe_of(recipe.removeprefix(HF)), encoding="utf-8")
        return pax.load(file, overlays or (), values)


def model_name(weights: str) -> str:
    """The last part of `hf:DIR` or `hf:ORGANIZATION/NAME`."""
    return Path(weights.removeprefix(HF)).resolve().name


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


def open_run(target: str, overlays: Words, sets: Words, run_dir: str | None, as_json: bool) -> pax.Run:
    """The run in a directory, or the run of a recipe."""
    if resolve_path(target).is_dir():
        from paxcli.training.run_dir import RunDir  # here, since it loads JAX

        if run_dir is not None:
            raise ConfigError(f"{target} is a run directory, and so is --run-dir {run_dir}.", "Give one of them.")
        return pax.Run(target, load_recipe(RunDir(target).require_recipe(), overlays, sets))
    return open_recipe(target, overlays, sets, run_dir, as_json)


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


def open_recipe(
    recipe: str, overlays: Words, sets: Words, run_dir: str | None, as_json: bool, dry_run: bool = False
) -> pax.Run:
    """The run of a recipe, or of `hf:DIR`, which is imported once, in `run_dir` or the recipe's own directory."""
    if recipe.startswith(HF):
        run_dir = run_dir or default_run_dir(model_name(recipe))
        run = pax.Run(run_dir, import_once(recipe, run_dir, None, overlays, sets, dry_run, as_json))
        if any(run.steps):
            hint = f"Write {run_dir} to use what it learned, or give another --run-dir."
            raise ConfigError(f"The run {run_dir} began with {recipe}, and was trained.", hint)
        return run
    loaded = load_recipe(recipe, overlays, sets)
    return pax.Run(default_run_dir(loaded.name) if run_dir is None else run_dir, loaded)


def import_once(
    source: str, run_dir: str, recipe: str | None, overlays: Words, sets: Words, dry_run: bool, as_json: bool
) -> pax.Recipe:
    """Imports `hf:DIR` into a run that has no checkpoint, in a process of its own: this one's devices are for training.

    Args:
      source: What to import.
      run_dir: The run.
      recipe: The recipe of the model; None = the import makes one.
      overlays: Those of the training; what does not fit the recipe is found before the import.
      sets: The same.
      dry_run: Whether only to print what would happen.
      as_json: Whether to print a failure as JSON.

    Returns:
      The recipe to train: `recipe`, or the one that the import wrote, or would write, without what training changed in
      it; with the overlays and sets.

    Raises:
      ConfigError: The run began with other weights, or an overlay or value does not fit the recipe.
      MissingError: The import was killed.
    """
    from paxcli.checkpoint.manager import CheckpointStore
    from paxcli.training.run_dir import EARLIER_RECIPE, RunDir
    from paxcli.training.start_from import ORIGIN, SOURCE

    run, name = RunDir(run_dir), source.removeprefix(HF)
    first, record = run.path / EARLIER_RECIPE.format(1), run.path / ORIGIN / SOURCE
    if CheckpointStore(run.checkpoints).steps():
        began = record.read_text() if record.exists() else "other parameters"
        if began not in (name, os.path.abspath(name)):
            hint = f"`pax train {shlex.quote(run_dir)}` resumes it; to start a new run, give another `--run-dir`."
            raise ConfigError(f"The run {run_dir} began with {began}, not with {name}.", hint)
        return load_recipe(recipe or (str(first) if first.exists() else run_dir), overlays, sets)
    command = [sys.executable, "-m", "paxcli", "import", name, "--format", "hf", "--out", run_dir]
    command += [] if recipe is None else ["--recipe", recipe, *retype_changes(overlays, sets)]
    command += ["--dry-run"] * dry_run + ["--json"] * as_json
    loaded = load_recipe(recipe or source, overlays, sets)
    loaded.validate()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        raise MissingError(f"The import was killed by signal {-done.returncode}.", "Memory may have run out.")
    summary = f"{'Would import' if dry_run else 'Imported'} {name} into {run_dir}.\n"
    text = summary if as_json and not done.returncode else done.stdout  # one JSON object is printed
    print(text, end="", file=sys.stdout if as_json and done.returncode else sys.stderr)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return loaded if dry_run or recipe is not None else load_recipe(run_dir, overlays, sets)
