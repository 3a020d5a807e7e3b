"""Every package is installed, and every dependency is pinned."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]


def test_every_package_is_installed() -> None:
    paxcli = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("paxcli/**/__init__.py")}
    recipes = {f"pax_{'.'.join(path.parent.relative_to(ROOT).parts)}" for path in ROOT.glob("recipes/**/__init__.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == paxcli | recipes


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_dependency_is_pinned_once(python: str) -> None:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.1"}
    pinned = [canonicalize_name(pin.name) for pin in PINS if not pin.marker or pin.marker.evaluate(environment)]
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in PROJECT["dependencies"] + extras["dev"] + extras["docs"]]
    assert {canonicalize_name(requirement.name) for requirement in wanted} - set(pinned) == set()
    assert len(pinned) == len(set(pinned))


def test_pins_are_exact_and_say_no_address() -> None:
    assert all(re.fullmatch(r"==[\w.!+]+", str(pin.specifier)) and pin.url is None for pin in PINS)


@pytest.mark.slow
def test_the_wheel_holds_the_package_the_recipes_and_their_overlays(tmp_path: pathlib.Path) -> None:
    for name in ("paxcli", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run(build, check=True, capture_output=True, timeout=600, cwd=tmp_path)
    (wheel,) = tmp_path.glob("paxcli-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in ROOT.glob("paxcli/**/*.py")}
    wanted |= {f"pax_{path.relative_to(ROOT)}" for path in ROOT.glob("recipes/**/*.py")}
    wanted |= {f"pax_{path.relative_to(ROOT)}" for path in ROOT.glob("recipes/overlays/*.yaml")}
    assert wanted - held == set()
    assert {path.split("/")[0] for path in held if ".dist-info" not in path} == {"paxcli", "pax_recipes"}
