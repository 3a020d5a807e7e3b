"""The reference lists exactly what exists: public names, verbs, fields, overlays, recipes."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import pathlib
import re

import pytest

import paxcli

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = (ROOT / "docs" / "reference" / "python.md").read_text()
ENTRIES = re.findall(r"^::: ([\w.]+)$", PYTHON, re.MULTILINE)

spec = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def test_each_public_name_has_an_entry_and_no_other_name_of_the_package() -> None:
    entries = {entry.removeprefix("paxcli.") for entry in ENTRIES if entry.count(".") == 1}
    assert entries == set(paxcli.__all__)
    assert len(ENTRIES) == len(set(ENTRIES))


def test_what_the_examples_of_own_parts_import_has_an_entry() -> None:
    """Except types of fields, which the reference names together."""
    code = re.findall(
        r"^```python.*?\n(.*?)^```", (ROOT / "docs" / "own-parts.md").read_text(), re.MULTILINE | re.DOTALL
    )
    imports = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    used = {f"{node.module}.{one.name}" for node in imports for one in node.names if str(node.module).startswith("pax")}
    used = {name for name in used if not name.startswith(("paxcli.config.fields.", "pax_recipes."))}
    assert len(used) >= 15
    assert used - set(ENTRIES) == set()


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_exists_and_is_documented(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if entry != "paxcli.layers.init.Init":
        assert (found.__doc__ or "").strip(), f"{entry} has no docstring"


def test_generated_pages_are_current() -> None:
    stale = [
        line
        for path, text in reference.quick_pages().items()
        for line in difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), path.name, "current", n=0)
    ]
    assert stale == [], "run `make reference`:\n" + "\n".join(stale)
    kept = {path for path, _ in reference.quick_pages().items()}
    assert [path.name for path in (ROOT / "docs" / "verbs").glob("*.md") if path not in kept] == []


def test_the_table_of_recipes_lists_each_recipe() -> None:
    from paxcli.config.index import find_recipes

    rows = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs" / "reference" / "recipes.md").read_text(), re.MULTILINE)
    assert rows == sorted(find_recipes()), "run `make reference`"


@pytest.mark.slow
def test_the_table_of_recipes_is_current() -> None:
    assert (ROOT / "docs" / "reference" / "recipes.md").read_text() == reference.recipes_page(), "run `make reference`"


@pytest.mark.slow
def test_the_table_of_meshes_is_current() -> None:
    assert (ROOT / "docs" / "meshes.md").read_text() == reference.meshes_page(), "run `make reference`"
