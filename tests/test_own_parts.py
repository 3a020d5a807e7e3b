"""The examples of docs/own-parts.md run, and learn."""

from __future__ import annotations

import pathlib
import re

import pytest

import paxcli as pax
from paxcli.training.progress import Reporter

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "own-parts.md").read_text()
FILES = dict(re.findall(r"^```python title=\"(\w+\.py)\"\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
RECIPES = re.findall(r"^\$ pax train \./(\w+\.py):(\w+)", PAGE, re.MULTILINE)
SMALL = {"global_batch_size": 4, "num_train_steps": 20, "summary_interval_steps": 10, "eval_interval_steps": None}
SMALL_MODEL = {"num_layers": 1, "model_dims": 32, "hidden_dims": 64, "num_heads": 2, "max_seq_len": 32}


def test_each_example_is_trained_by_a_command_of_the_page():
    assert [file for file, _ in RECIPES] == list(FILES) and len(FILES) == 5


@pytest.mark.parametrize(("file", "recipe"), RECIPES)
def test_an_own_part_trains(file: str, recipe: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / file).write_text(FILES[file])
    changes = SMALL | ({"max_seq_len": 32} if file == "model.py" else SMALL_MODEL)
    changes |= {"learning_rate": 0.3 if file == "model.py" else 0.01, "eval_inputs": []}
    run = pax.train(pax.load(f"{tmp_path / file}:{recipe}", set=changes), tmp_path / "run", progress=Reporter())
    loss = run.metrics()["loss"]
    assert loss[-1] < loss[0] - 0.05, loss
