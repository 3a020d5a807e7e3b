"""The index of recipes and overlays, read from source: no recipe is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paxcli.errors import ConfigError

RECIPES_PACKAGE = "pax_recipes"
ENTRY_POINTS = "pax.recipes"


class RecipeEntry(NamedTuple):
    """The location of one recipe. `module` is None for a recipe in a file outside the installed packages."""

    name: str
    pax_name: str | None
    summary: str
    module: str | None
    function: str
    path: Path
    line: int


def recipe_name(function: str) -> str:
    """The name of a recipe function on the command line: `c4_1b` is `c4-1b`, and `gpt2_1p5b` is `gpt2-1.5b`."""
    return re.sub(r"(?<=\d)p(?=\d)", ".", function.replace("_", "-"))


def find_recipes() -> dict[str, RecipeEntry]:
    """All installed recipes by name, sorted.

    Raises:
      ConfigError: Two recipes have the same name, or a file is not valid Python.
    """
    entries: list[RecipeEntry] = []
    for package, root in _packages():
        for path in sorted([root] if root.is_file() else root.rglob("*.py")):
            entries += recipes_in(path, _module_name(package, root, path))
    seen: dict[str, RecipeEntry] = {}
    for entry in entries:
        for name in filter(None, (entry.name, entry.pax_name)):
            if name in seen:
                places = f"{seen[name].path}:{seen[name].line} and {entry.path}:{entry.line}"
                raise ConfigError(f"Two recipes are called `{name}`: {places}.", "Rename one of the functions.")
            seen[name] = entry
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def recipes_in(path: Path, module: str | None = None) -> list[RecipeEntry]:
    """The recipes that a file defines, in file order."""
    entries = []
    for node in parse(path).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        for decorator in filter(is_recipe_decorator, node.decorator_list):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            name, pax_name = node.name, _pax_name(decorator)
            entries.append(RecipeEntry(recipe_name(name), pax_name, summary, module, name, path, node.lineno))
    return entries


def find_overlays() -> dict[str, Path]:
    """The overlays of the installed recipe packages: name → file."""
    files = [path for _, root in _packages() for path in sorted(root.glob("overlays/*.yaml"))]
    return {path.stem: path for path in reversed(files)}


def parse(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}.", "Fix the Python on this line.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.", "Correct the path.") from None


def is_recipe_decorator(node: ast.expr) -> bool:
    """Whether a decorator is `@recipe` or `@recipe(...)`, with or without a module in front."""
    target = node.func if isinstance(node, ast.Call) else node
    return getattr(target, "id", getattr(target, "attr", None)) == "recipe"


def _pax_name(decorator: ast.expr) -> str | None:
    if not isinstance(decorator, ast.Call):
        return None
    values = decorator.args + [keyword.value for keyword in decorator.keywords]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None  # type: ignore[return-value]


def package_directories() -> list[Path]:
    """The directories of pax's source code: of `paxcli`, and of its recipes."""
    return [Path(str(importlib.import_module(name).__file__)).parent for name in ("paxcli", RECIPES_PACKAGE)]


def _packages() -> Iterator[tuple[str, Path]]:
    """The packages that hold recipes, with their directory or file."""
    from importlib.metadata import entry_points

    for name in dict.fromkeys([RECIPES_PACKAGE, *(point.value for point in entry_points(group=ENTRY_POINTS))]):
        top, *rest = name.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            raise ConfigError(f"The recipe package `{name}` is not installed.", "Reinstall its distribution.")
        root = Path(spec.origin)
        root = root.parent.joinpath(*rest) if root.name == "__init__.py" else root
        yield name, root if root.is_dir() or root.suffix else root.with_suffix(".py")


def _module_name(package: str, root: Path, path: Path) -> str:
    if path == root:
        return package
    return ".".join([package, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
