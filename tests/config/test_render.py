from __future__ import annotations

import contextvars
import json
import pathlib
import re
import subprocess
import sys

import fiddle as fdl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxcli.config.consent import code_consent
from paxcli.config.render import config_text, parse_config_text, recipe_yaml, render_text
from paxcli.config.resolve import SourcedValue, resolve
from paxcli.config.values import diff, plain_values
from paxcli.errors import DataError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_config_text_is_read_back(x: object, y: object) -> None:
    config = fdl.Config(dict, x=x, below=fdl.Config(dict, y=y))
    assert parse_config_text(config_text(config)) == {"below": "dict", "below.y": y, "x": x} == plain_values(config)


def test_config_text_is_one_sorted_line_for_each_value(mine: pathlib.Path) -> None:
    lines = config_text(resolve(f"{mine}:small").config).splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition(" = ")[0])
    assert "model.num_layers = 2" in lines and 'inputs.1.files = ["x"]' in lines


def test_config_text_is_the_same_in_another_process(mine: pathlib.Path) -> None:
    code = "from paxcli.config import render, resolve\n"
    code += f"print(render.config_text(resolve.resolve('{mine}:small').config))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == config_text(resolve(f"{mine}:small").config).strip()


def test_damaged_config_text() -> None:
    with pytest.raises(DataError, match="Line 2"):
        parse_config_text("a = 1\nb = {\n")


def test_recipe_yaml_gives_the_run_again(
    mine: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o.yaml").write_text("dropout: 0.5\npercore_batch_size: 0.25\n")
    first = resolve("mine.py:small", ["o.yaml"], ["global_batch_size=8", "betas=[0.1, 0.2]", "ici_mesh_shape.fsdp=2"])
    run = tmp_path / "elsewhere" / "run"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(recipe_yaml(first))
    monkeypatch.chdir(run)
    context = contextvars.copy_context()
    context.run(code_consent.set, lambda question: True)
    again = context.run(resolve, "../run")
    assert again.name == "small"
    assert fdl.build(again.config).train.global_batch_size == 8
    assert diff(plain_values(first.config), plain_values(again.config)) == []


def test_the_tree_shows_every_value_and_its_source(mine: pathlib.Path) -> None:
    resolved = resolve(f"{mine}:shared_4", sets=["num_layers=5"])
    text = render_text(resolved)
    assert re.search(r"^  num_layers: 5 +# --set$", text, re.M)
    assert re.search(r"^  0: Input +# recipe$", text, re.M)
    assert "\x1b" not in text and "\x1b[2m" in render_text(resolved, color=True)
    assert len([line for line in text.splitlines() if "  # " in line]) == len(resolved.values)


def test_values_are_json(mine: pathlib.Path) -> None:
    sourced = resolve(f"{mine}:small").values
    values = {path: value.value for path, value in sourced.items()}
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert sourced["train.color"] == SourcedValue("red", "default")
