from __future__ import annotations

import pathlib

import pytest

from paxcli.config.extract import recipe_source
from paxcli.config.index import find_recipes, recipes_in
from paxcli.config.load import find_entry, load
from paxcli.config.values import diff, plain_values


@pytest.mark.parametrize("name", ["small", "shared_4"])
def test_a_copy_is_one_recipe_with_the_same_values(mine: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    copy = tmp_path / "copy.py"
    copy.write_text(recipe_source(find_entry(f"{mine}:{name}")))
    assert [(e.function, e.pax_name) for e in recipes_in(copy)] == [(name, None)]
    assert diff(plain_values(load(f"{mine}:{name}").config), plain_values(load(str(copy)).config)) == []
    text = copy.read_text()
    assert "# What the model is wide." in text and "def broken" not in text


@pytest.mark.parametrize("name", find_recipes())
def test_every_installed_recipe_can_be_copied(tmp_path: pathlib.Path, name: str) -> None:
    copy = tmp_path / "copy.py"
    copy.write_text(recipe_source(find_entry(name)))
    assert load(str(copy)).config == load(name).config


def test_imports_from_beside_the_recipe_get_their_full_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pack" / "lm" / "big.py"
    path.parent.mkdir(parents=True)
    imports = "from . import small\nfrom ..base import x as y\nimport os\n"
    path.write_text(imports + "\n@recipe()\ndef big():\n    return small.f(y)\n")
    (entry,) = recipes_in(path, "pack.lm.big")
    source = recipe_source(entry)
    assert "from pack.lm import small\nfrom pack.base import x as y" in source
    assert "import os" not in source
