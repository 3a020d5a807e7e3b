from __future__ import annotations

import pathlib

import pytest

from paxcli.config.overlay import read_overlay, read_yaml_recipe
from paxcli.errors import ConfigError


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    return path


def test_a_file(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "big.yaml", "task.model.num_layers: 48\nmesh.ici_mesh_shape: {fsdp: 4}\n")
    layer = read_overlay(str(path))
    assert layer.values == {"task.model.num_layers": 48, "mesh.ici_mesh_shape": {"fsdp": 4}}
    assert layer.source == f"overlay {path}"


def test_an_unknown_overlay() -> None:
    with pytest.raises(ConfigError, match="no overlay `no-such`"):
        read_overlay("no-such")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", r"x\.yaml:3"),
        ("a: 1\na: 2\n", r"x\.yaml:2: `a` occurs twice"),
        ("- a\n", "not a mapping"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_bad_yaml_names_its_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_overlay(str(write(tmp_path / "x.yaml", text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("set: {a: 1}\n", "does not name its base recipe"),
        ("recipe: tiny\nsets: {a: 1}\n", "unknown key `sets`"),
        ("recipe: tiny\nset: [a]\n", "not a mapping"),
        ("recipe: tiny\noverlays: cpu\n", "not a list"),
    ],
)
def test_bad_yaml_recipes(tmp_path: pathlib.Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml_recipe(write(tmp_path / "x.yaml", text))


@pytest.mark.parametrize(
    ("key", "hint"),
    [("base_config", "`pax maxtext-convert` makes one of a config of MaxText"), ("sets", "Did you mean `set`")],
)
def test_a_config_of_another_tool_is_not_a_recipe(tmp_path: pathlib.Path, key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_yaml_recipe(write(tmp_path / "x.yml", f"{key}: base.yml\nsteps: 10\n"))
    assert raised.value.message.endswith(f"unknown key `{key}`.") and hint in str(raised.value.hint)
