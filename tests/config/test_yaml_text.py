"""YAML that would take pax down: refused in bounded time, as a mistake of the user's."""

from __future__ import annotations

import pathlib
import time

import pytest
import yaml

from paxcli.config.overlay import read_overlay, read_yaml_recipe
from paxcli.config.resolve import resolve
from paxcli.config.yaml_text import parse_yaml
from paxcli.errors import ConfigError

_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
_HOSTILE = {
    "alias bomb": (_BOMB, "100,000 values"),
    "recursive alias": ("a: &a [1, *a]\n", "contains it"),
    "recursive mapping": ("a: &a {b: *a}\n", "contains it"),
    "list as key": ("? [a, b]\n: 1\n", "not a name"),
    "nested list as key": ("a: {[1]: 2}\n", "not a name"),
    "deep list": ("a: " + "[" * 3000 + "]" * 3000, "levels deep"),
    "deeper list": ("a: " + "[" * 100_000, "levels deep"),
    "deep mapping": ("a: " + "{b: " * 3000, "levels deep"),
    "number of 400 digits": ("num_layers: " + "9" * 400, "400 digits"),
    "number of 5000 digits": ("num_layers: " + "9" * 5000, "5000 digits"),
    "integer key": ("1: 2\n", "not a mapping of names"),
    "no such date": ("a: 2020-13-45\n", "month"),
}


@pytest.mark.parametrize(("text", "message"), _HOSTILE.values(), ids=_HOSTILE)
def test_hostile_files_are_refused_quickly(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        read_overlay(str(tmp_path / "x.yaml"))
    assert time.monotonic() - began < 10


def test_an_integer_is_not_a_path(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.yaml").write_text("recipe: tiny\nset: {1: 2}\n")
    with pytest.raises(ConfigError, match="not a mapping of paths"):
        read_yaml_recipe(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "assignment",
    [
        "optimizer=[AdamW]",
        "optimizer={AdamW: 1}",
        "num_layers=" + "9" * 400,
        "learning_rate=" + "9" * 400,
        "learning_rate=1" + "0" * 5000,
        "random_seed=-" + "9" * 400,
        "mesh.ici_mesh_shape=&a {data: *a}",
        "mesh.ici_mesh_shape=" + "[" * 3000,
        "mesh.ici_mesh_shape={[data]: 1}",
    ],
    ids=lambda text: text[:30],
)
def test_hostile_values_are_mistakes(assignment: str) -> None:
    with pytest.raises(ConfigError):
        resolve("tiny", sets=[assignment])


@pytest.mark.parametrize("path", ["num_layers", "learning_rate", "random_seed"])
def test_huge_integers_of_python_are_mistakes(path: str) -> None:
    with pytest.raises(ConfigError):
        resolve("tiny", sets={path: 10**400})


def test_aliases_and_merge_keys_are_read() -> None:
    text = "a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\nd: 1.5\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None


@pytest.mark.parametrize("text", ["010", "-012", "0_7"])
def test_no_number_is_taken_for_an_octal_one(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="octal"):
        parse_yaml(text)
    assert [parse_yaml(each) for each in ("0", "-1", "0x10", "0.5", "1_000")] == [0, -1, 16, 0.5, 1000]
