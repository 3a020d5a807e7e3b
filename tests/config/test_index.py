from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

from paxcli.config.index import find_recipes, recipes_in
from paxcli.errors import ConfigError


def test_recipes_of_a_file(mine: pathlib.Path) -> None:
    entries = {entry.name: entry for entry in recipes_in(mine)}
    assert list(entries) == ["small", "shared-4", "broken", "unfinished"]
    assert entries["small"].summary == "A small one."
    assert entries["shared-4"].pax_name == "Pax4Small"
    assert mine.read_text().splitlines()[entries["shared-4"].line - 1].startswith("def shared_4")


def test_finding_recipes_imports_none_of_them_and_no_configuration_library() -> None:
    code = (
        "import sys; from paxcli.config.index import find_recipes; assert find_recipes();"
        "print([m for m in sys.modules if m.split('.')[0] in ('fiddle', 'yaml', 'jax', 'numpy', 'pax_recipes')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def _install(folder: pathlib.Path, package: str, source: str) -> None:
    (folder / package / "lm").mkdir(parents=True)
    (folder / package / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / package / "lm" / "big.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[pax.recipes]\n{package} = {package}.lm\n")


RECIPE = "from paxcli.config.recipe import recipe\n@recipe()\ndef {}():\n    '''Sum.'''\n"


def test_another_package_adds_recipes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "pax_extra_one", RECIPE.format("from_elsewhere"))
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("pax_extra_one") == "1.0"
    entry = find_recipes()["from-elsewhere"]
    assert (entry.module, entry.function) == ("pax_extra_one.lm.big", "from_elsewhere")


def test_two_recipes_of_one_name_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "pax_extra_two", RECIPE.format("tiny"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"`tiny`: .*tiny\.py:\d+ and .*big\.py:3"):
        find_recipes()


def test_broken_python_names_file_and_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r"broken\.py:2"):
        recipes_in(path)
