"""The source of one recipe, with the definitions of its file that it uses."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator

from paxcli.config.index import RecipeEntry, is_recipe_decorator, parse


def recipe_source(entry: RecipeEntry) -> str:
    """Python source of a file with this recipe alone, which computes the same values.

    It includes the functions and constants of the original file that the recipe uses. It has no Pax name, because an
    edited copy no longer computes what Pax's class does.
    """
    lines = entry.path.read_text(encoding="utf-8").splitlines()
    kept = _find_dependencies(parse(entry.path).body, entry.function)
    imports = [node for node in kept if isinstance(node, ast.Import | ast.ImportFrom)]
    head = [_import_text(node, lines, entry) for node in imports]
    others = [_text(node, lines, entry.function) for node in kept if node not in imports]
    docstring = f'"""Recipe `{entry.name}`, copied to be changed."""'
    return "\n\n".join([docstring, "\n".join(head) + "\n", "\n\n\n".join(others)]) + "\n"


def _find_dependencies(body: list[ast.stmt], function: str) -> list[ast.stmt]:
    """The statements that define `function` and everything it uses, in file order."""
    wanted, kept = {function, "recipe", "annotations"}, set()
    while added := [node for node in body if node not in kept and wanted & set(_names_defined_by(node))]:
        kept.update(added)
        used = (n for node in added for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        wanted |= {name.id for name in used}
    return [node for node in body if node in kept]


def _names_defined_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    else:
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        yield from (name.id for name in stored)
        for child in (n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)):
            yield from _names_defined_by(child)


def _import_text(node: ast.stmt, lines: list[str], entry: RecipeEntry) -> str:
    """The source of an import; a relative one becomes absolute, so that it works in any directory."""
    if isinstance(node, ast.ImportFrom) and node.level and entry.module:
        package = entry.module if entry.path.name == "__init__.py" else entry.module.rpartition(".")[0]
        absolute = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        return ast.unparse(ast.ImportFrom(absolute, node.names, 0))
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _text(node: ast.stmt, lines: list[str], function: str) -> str:
    """The source of a statement with the comments above it. Only `function` keeps its `@recipe` decorator."""
    decorators = getattr(node, "decorator_list", [])
    own = [f"@{ast.unparse(decorator)}" for decorator in decorators if not is_recipe_decorator(decorator)]
    if getattr(node, "name", None) == function:
        own.append("@recipe()")
    comment = first = min([decorator.lineno for decorator in decorators], default=node.lineno)
    while comment > 1 and lines[comment - 2].startswith("#"):
        comment -= 1
    return "\n".join([*lines[comment - 1 : first - 1], *own, *lines[node.lineno - 1 : node.end_lineno]])
