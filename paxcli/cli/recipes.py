"""`pax recipes`."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, OtherRecipe, OverlayOption, RecipeArgument, SetOption, writable
from paxcli.cli.output import say_result
from paxcli.cli.runs import load_recipe
from paxcli.config.index import find_recipes
from paxcli.config.paths import write_output
from paxcli.errors import ConfigError
from paxcli.log import use_color

app = typer.Typer(help="List, print, copy and compare recipes.", rich_markup_mode=None)

NewFile = Annotated[Path, typer.Argument(metavar="FILE", callback=writable, help="The new .py file.")]
ExitCodeOption = Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ, as `git diff` does.")]


@app.command("ls")
def list_recipes(as_json: JsonOption = False) -> None:
    """List the installed recipes.

    \b
    Examples:
      pax recipes ls
      pax recipes ls --json
    """
    entries = list(find_recipes().values())
    width = max((len(entry.name) for entry in entries), default=0)
    lines = [f"{e.name:<{width}}  {e.summary}" + (f"  (Pax: {e.pax_name})" if e.pax_name else "") for e in entries]
    if sys.stdout.isatty():  # in a pipe one line for each
        columns = max(shutil.get_terminal_size().columns, width + 40)
        indent = " " * (width + 2)
        lines = [textwrap.fill(line, columns, subsequent_indent=indent, break_on_hyphens=False) for line in lines]
    result = [{"name": e.name, "pax_name": e.pax_name, "summary": e.summary} for e in entries]
    say_result(result, "\n".join(lines), as_json)


@app.command()
def show(
    recipe: RecipeArgument, sets: SetOption = None, overlays: OverlayOption = None, as_json: JsonOption = False
) -> None:
    """Print a recipe in full: its sizes, and every value with its origin.

    \b
    Examples:
      pax recipes show tiny
      pax recipes show tiny --overlay cpu --set num_layers=4
    """
    loaded = load_recipe(recipe, overlays, sets)
    from paxcli.training.validate import validate  # here, since it loads JAX

    validate(loaded.config, reads_data=False)
    sizes = loaded.sizes()
    values = {path: {"value": value.value, "from": value.source} for path, value in loaded.values.items()}
    result = {"name": loaded.name, "pax_name": loaded.pax_name, **sizes, "values": values}
    say_result(result, f"{_title(loaded, sizes)}\n\n{loaded.text(use_color(sys.stdout))}", as_json)


@app.command()
def cp(recipe: RecipeArgument, file: NewFile, dry_run: DryRunOption = False, as_json: JsonOption = False) -> None:
    """Copy a recipe's source into a new file, to edit it.

    \b
    Examples:
      pax recipes cp tiny mine.py
      pax recipes cp c4-1b mine.py --dry-run
    """
    from paxcli.config.extract import recipe_source
    from paxcli.config.load import find_entry

    if file.suffix != ".py" or file.exists():
        reason = "already exists" if file.exists() else "is not a .py file"
        raise ConfigError(f"{file} {reason}.", f"Choose another name, such as `{file.with_suffix('')}_2.py`.")
    entry = find_entry(recipe)
    source = recipe_source(entry)
    if not dry_run:
        write_output(file, source.encode())
    result = {"name": entry.name, "file": str(file), "written": not dry_run, "source": source}
    train = ["pax", "train", f"{file}:{entry.function}", "--run-dir", f"runs/{file.stem}"]
    text = source.rstrip() if dry_run else f"Wrote {file}. To train it: {shlex.join(train)}"
    say_result(result, text, as_json)


@app.command("diff")
def compare(
    recipe: RecipeArgument, other: OtherRecipe, exit_code: ExitCodeOption = False, as_json: JsonOption = False
) -> None:
    """Print the values in which two recipes differ. Also prints the sizes that result.

    \b
    Examples:
      pax recipes diff c4-1b c4-16b
      pax recipes diff tiny ./mine.py --exit-code
    """
    from paxcli.config.render import value_text
    from paxcli.config.values import ABSENT, diff

    both = [load_recipe(name, None, None) for name in (recipe, other)]
    before, after = (one.sizes() | {path: value.value for path, value in one.values.items()} for one in both)
    differences, lines = {}, []
    for path, a, b in diff(before, after):
        differences[path] = {side: value for side, value in (("a", a), ("b", b)) if value is not ABSENT}
        a_text, b_text = ("(none)" if value is ABSENT else value_text(value) for value in (a, b))
        lines.append(f"{path}: {a_text} -> {b_text}")
    text = "\n".join(lines) or "They do not differ."
    say_result({"a": recipe, "b": other, "differences": differences}, text, as_json)
    if exit_code and differences:
        raise typer.Exit(1)


def _title(recipe: pax.Recipe, sizes: dict[str, Any]) -> str:
    pax_name = f" (Pax: {recipe.pax_name})" if recipe.pax_name else ""
    lines = [f"  {key.replace('_', ' ')}: {value:,.0f}" for key, value in sizes.items() if value is not None]
    return "\n".join([recipe.name + pax_name, *lines])
