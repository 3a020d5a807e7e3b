"""Loads a recipe by name, file or run directory into a config."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import fiddle as fdl

from paxcli.config.consent import RECIPE_FILE, RUN_RECIPE, require_consent
from paxcli.config.index import RecipeEntry, find_recipes, recipe_name, recipes_in
from paxcli.config.overlay import YAML_SUFFIXES, Assignments, read_overlay, read_yaml_recipe
from paxcli.config.paths import resolve_path
from paxcli.errors import ConfigError, MissingError, PaxError, did_you_mean, names_hint

# Of files that were imported: their directories, on `sys.path`, and the modules that they imported from there.
_directories: list[str] = []
_beside_recipes: set[str] = set()


class Loaded(NamedTuple):
    """A recipe's config, and the assignments that a YAML recipe makes on top of it.

    Attributes:
      name: The recipe's name.
      pax_name: The experiment class of Pax that computes the same, if any.
      target: The argument that loads it again from any directory.
      config: An `fdl.Config`, new on each load.
      assignments: The assignments of a YAML recipe, in order.
    """

    name: str
    pax_name: str | None
    target: str
    config: fdl.Config
    assignments: tuple[Assignments, ...] = ()


def load(target: str) -> Loaded:
    """Loads a recipe.

    Args:
      target: A name (`c4-1b`, `c4_1b`), a class name of Pax, `./mine.py:my_recipe`, `./mine.py` when it has one
        recipe, `mine.yaml`, or a run directory, written with a `/` (`./tiny`) if a recipe has the same name.

    Raises:
      ConfigError: There is no such recipe, it raises an error, or it is Python code that a run directory names and
        there is no consent to run it.
    """
    if is_run_dir(target):
        return _load_yaml(resolve_path(target) / RUN_RECIPE)
    if Path(target).suffix in YAML_SUFFIXES:
        return _load_yaml(resolve_path(target))._replace(name=Path(target).stem, pax_name=None)
    entry = find_entry(target)
    own_target = entry.name if entry.module else f"{entry.path.resolve()}:{entry.function}"
    return Loaded(entry.name, entry.pax_name, own_target, _call(entry))


def is_run_dir(target: str) -> bool:
    """Whether `target` is a run directory, written with a `/` if a recipe has the same name."""
    has_recipe = bool(target) and (resolve_path(target) / RUN_RECIPE).exists()
    return has_recipe and ("/" in target or recipe_name(target) not in find_recipes())


def find_entry(target: str) -> RecipeEntry:
    """Locates the recipe function of a name, a class name of Pax, or a `.py` file. Imports nothing."""
    path, _, function = target.rpartition(":") if ":" in target else (target, "", "")
    if path.endswith(".py"):
        return _entry_in_file(Path(path), function)
    by_name = {name: entry for entry in find_recipes().values() for name in (entry.name, entry.pax_name) if name}
    entry = by_name.get(recipe_name(target)) or by_name.get(target.rpartition(".")[2])
    weights = target.removeprefix("hf:")
    if entry is None and (weights != target or (resolve_path(target) / "config.json").is_file()):
        hint = f"It is a Hugging Face model: `pax import {weights} --out RUN_DIR`; most commands take `hf:{weights}`."
        raise ConfigError(f"`{target}` is not a recipe.", hint)
    if entry is None:
        hint = did_you_mean(target, by_name) or "`pax recipes ls` lists them; a file is `./mine.py:my_recipe`."
        raise ConfigError(f"There is no recipe{' or run directory' if '/' in target else ''} `{target}`.", hint)
    return entry


def _entry_in_file(path: Path, function: str) -> RecipeEntry:
    if not (entries := {entry.function: entry for entry in recipes_in(path)}):
        raise ConfigError(f"{path} has no recipe.", "Put `@recipe()` on a public function in it.")
    if not function and len(entries) > 1:
        raise ConfigError(f"{path} has {len(entries)} recipes.", f"Choose one: `{path}:{next(iter(entries))}`.")
    if entry := entries.get(function.replace("-", "_") or next(iter(entries))):
        return entry
    raise ConfigError(f"{path} has no recipe `{function}`.", names_hint(function, entries))


def _call(entry: RecipeEntry) -> fdl.Config:
    try:
        module = importlib.import_module(entry.module) if entry.module else _import_file(entry.path)
        config = getattr(module, entry.function)()
    except PaxError:
        raise
    except ModuleNotFoundError as error:
        hint = "Install it; lingvo is `pip install 'lingvo>=0.14'`."
        raise MissingError(f"{entry.path}: recipe `{entry.name}` needs the package `{error.name}`.", hint) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if Path(f.filename) == entry.path.resolve()), entry.line)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "Correct the recipe; `PAX_DEBUG=1` prints the traceback."
        raise ConfigError(f"{entry.path}:{line}: recipe `{entry.name}` fails: {cause}", hint) from error
    if not isinstance(config, fdl.Config):
        cause = f"recipe `{entry.name}` returns {type(config).__name__}, not an `fdl.Config`"
        raise ConfigError(f"{entry.path}:{entry.line}: {cause}.", "Return `Experiment.config(…)`.")
    return config


def _import_file(path: Path) -> ModuleType:
    """Imports a file as a module; it may import modules from its own directory.

    Those are imported again for each file, as the file is: they may have changed, and a file in another directory may
    have others of the same names.
    """
    resolved = path.resolve()
    own = str(resolved.parent)
    others = [one for one in _directories if one != own]
    if own not in sys.path or own in _directories:
        sys.path[:] = [*(one for one in sys.path if one not in _directories), own, *others]
        _directories[:] = [own, *others]
    for beside in _beside_recipes:
        sys.modules.pop(beside, None)
    known = {*sys.modules}
    name = f"{RECIPE_FILE}{resolved.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        _beside_recipes.update(one for one in sys.modules.keys() - known if resolved.with_name(f"{one}.py").is_file())
    return module


def _load_yaml(path: Path, inside: tuple[Path, ...] = ()) -> Loaded:
    if path in inside:
        raise ConfigError(f"{path} is based on itself.", "Name another recipe in its `recipe:` line.")
    name, overlays, values = read_yaml_recipe(path)
    target = _beside(path, name)
    of_runs = [recipe for recipe in (*inside, path) if recipe.name == RUN_RECIPE]
    if of_runs and target.partition(":")[0].endswith(".py"):
        require_consent(of_runs[0], target)
    base = _load_yaml(resolve_path(target), (*inside, path)) if Path(target).suffix in YAML_SUFFIXES else load(target)
    layers = [read_overlay(_beside(path, overlay)) for overlay in overlays]
    return base._replace(target=str(path), assignments=(*base.assignments, *layers, Assignments("recipe", values)))


def _beside(path: Path, name: str) -> str:
    """Resolves a file that a YAML recipe names relative to the directory of the YAML file."""
    is_file = Path(name.partition(":")[0]).suffix in (".py", *YAML_SUFFIXES)
    return str(path.parent / name) if is_file and "://" not in name else name
