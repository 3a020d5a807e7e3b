"""Arguments and options that several commands share.

Typer names an option after its parameter, `--run-dir` for `run_dir`. A name is given where it differs, and to a flag,
which would have a `--no-…` otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paxcli.config.index import find_overlays, find_recipes
from paxcli.errors import MissingError


def complete_recipe(incomplete: str) -> list[str]:
    """Recipe names that start with `incomplete`, for shell completion."""
    return [name for name in find_recipes() if name.startswith(incomplete)]


def complete_overlay(incomplete: str) -> list[str]:
    """Overlay names that start with `incomplete`, for shell completion."""
    return [name for name in find_overlays() if name.startswith(incomplete)]


def writable(file: Path | None) -> Path | None:
    """The file of an option, checked before the work whose result it takes. Raises MissingError for an unusable one."""
    if file is None:
        return None
    problems = {
        f"there is no directory {file.parent}": not file.parent.is_dir(),
        "it is a directory": file.is_dir(),
        "permission denied": not os.access(file if file.exists() else file.parent, os.W_OK),
    }
    _raise_first(problems, f"Cannot write {file}", "Choose another file.")
    return file


def creatable(directory: str) -> str:
    """The directory of an option, new or not, checked before the work that fills it; one in a bucket is not checked.

    Raises MissingError for an unusable one.
    """
    if "://" in directory:
        return directory
    path = Path(directory).expanduser().absolute()
    existing = next(one for one in (path, *path.parents) if one.exists())
    problems = {
        "its path is empty": not directory,
        f"{existing} is a file": not existing.is_dir(),
        f"permission denied for {existing}": not os.access(existing, os.W_OK),
    }
    _raise_first(problems, f"Cannot write the directory `{directory}`", "Choose another one.")
    return directory


def _raise_first(problems: Mapping[str, bool], message: str, hint: str) -> None:
    """Raises MissingError for the first problem that there is."""
    if problem := next((name for name, is_there in problems.items() if is_there), None):
        raise MissingError(f"{message}: {problem}.", hint)


def file_option(help: str) -> Any:
    """An option whose file the command writes."""
    return typer.Option(metavar="FILE", callback=writable, help=help)


def directory_option(help: str, metavar: str = "DIR") -> Any:
    """An option whose directory the command fills."""
    return typer.Option(metavar=metavar, callback=creatable, help=help)


def _recipe_argument(metavar: str, help: str) -> Any:
    """An argument that names a recipe."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete_recipe)


_RECIPE = "A name from `pax recipes ls`, ./mine.py:my_recipe, mine.yaml, or hf:DIR|NAME."
_RUN_OR_RECIPE = "A run directory, a recipe that was trained in runs/RECIPE, or hf:DIR|NAME."
_OVERLAY = "Apply an overlay, such as cpu. Repeatable, in order. Default: none."

RecipeArgument = Annotated[str, _recipe_argument("RECIPE", _RECIPE)]
OtherRecipe = Annotated[str, _recipe_argument("OTHER", "The recipe to compare with.")]
RunOrRecipeArgument = Annotated[str, _recipe_argument("RUN_DIR|RECIPE", _RUN_OR_RECIPE)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set a value, such as num_layers=4. Repeatable. Default: none."),
]
OverlayOption = Annotated[
    list[str] | None, typer.Option("--overlay", metavar="NAME|FILE", help=_OVERLAY, autocompletion=complete_overlay)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON. Default: text.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print what would happen. Default: do it.")]
# A `Path` would drop a slash of gs://.
RunDirsArgument = Annotated[list[str], typer.Argument(metavar="RUN_DIR...", help="Run directories, shown together.")]
RunDirOption = Annotated[str | None, typer.Option(metavar="DIR", help="The run directory. Default: runs/RECIPE.")]
StepOption = Annotated[int | None, typer.Option(min=0, help="Which checkpoint. Default: the latest.")]
