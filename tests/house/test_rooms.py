"""The order of rooms: one way down, never up, siblings apart; every room is tested."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = sorted(path.parent.name for path in ROOT.glob("paxcli/*/__init__.py"))
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-logo"]


def lint_imports(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=600)


def test_rooms_import_one_way() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [("mesh", "training"), ("layers", "optim"), ("config", "cli"), ("inputs", "models"), ("checkpoint", "metrics")],
)
def test_an_import_in_the_wrong_direction_is_caught(tmp_path: pathlib.Path, importer: str, imported: str) -> None:
    shutil.copytree(ROOT / "paxcli", tmp_path / "paxcli", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "recipes", tmp_path / "pax_recipes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / f"paxcli/{importer}/wrong_way.py").write_text(f"import paxcli.{imported}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert f"paxcli.{importer}.wrong_way" in result.stdout


def test_every_room_has_its_place_in_the_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = " ".join(layer for contract in contracts for layer in contract.get("layers", []))
    assert [room for room in ROOMS if f"paxcli.{room}" not in named] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_tested(room: str) -> None:
    assert list((ROOT / "tests" / room).glob("test_*.py")), f"tests/{room}/ holds no tests for paxcli/{room}/"
