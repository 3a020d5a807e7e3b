"""Runs whose length is given in epochs: `num_train_epochs`."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paxcli as pax
from paxcli.errors import ConfigError, DataError, Stopped
from paxcli.inputs.text import TextInput
from paxcli.metrics.meter import Record
from paxcli.training.session import with_counted_steps
from tests.training.runs import losses
from tests.training.test_loop import Messages

STEPS, EPOCHS = "task.train.num_train_steps", "task.train.num_train_epochs"
SMALL = {"num_layers": 1, "model_dims": 16, "hidden_dims": 32, "num_heads": 1, "max_seq_len": 16, "eval_inputs": []}
SMALL |= {"global_batch_size": 4, "summary_interval_steps": 1, "warmup_steps": 1}
SYNTHETIC = {"train_input": "SyntheticInput", "train_input.num_examples": 10}


@pytest.fixture
def text(tmp_path: pathlib.Path) -> dict[str, Any]:
    """Ten rows, each a document."""
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": chr(ord("a") + n) * (3 + n)}) + "\n" for n in range(10)))
    return {"train_input": "TextInput", "train_input.files": [str(file)], "train_input.packing": "one_per_row"}


def count(**values: Any) -> int:
    """The steps of a recipe with so many epochs."""
    recipe = pax.load("tiny", set={**SMALL, **SYNTHETIC, **values})
    counted, text, _ = with_counted_steps(recipe.config, recipe.yaml())
    assert counted.task.train.num_train_epochs is None and recipe.config.task.train.num_train_epochs is not None
    assert f"{STEPS}: {counted.task.train.num_train_steps}\n" in text
    return counted.task.train.num_train_steps


@pytest.mark.parametrize("epochs", [1, 3, 0.5, 2.25, 1.1])
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 100, 1000])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_steps_are_those_of_hugging_face_for_full_batches(epochs: float, rows: int, batch: int) -> None:
    """Its `Trainer` has `ceil(epochs * steps of an epoch)`, whose last batch may be smaller; ours is never smaller."""
    found = count(num_train_epochs=epochs, global_batch_size=batch, **{"train_input.num_examples": rows})
    theirs = math.ceil(epochs * math.ceil(rows / batch) - 1e-9)
    assert found == theirs if rows % batch == 0 else theirs - epochs < found <= theirs
    assert 0 <= found * batch - epochs * rows + 1e-9 < batch + 1e-9  # every row, and not a batch more


def test_data_that_ends_has_one_epoch() -> None:
    once = {"train_input.repeat": False}
    assert count(num_train_epochs=1, **once) == count(num_train_epochs=1.1, **once) == 3  # the last batch has room
    with pytest.raises(ConfigError, match=r"it ends after one epoch; the run has 1\.3") as error:
        count(num_train_epochs=1.3, **once)
    assert "train_input.repeat" in str(error.value.hint)


def test_a_batch_of_several_microbatches_is_one_step() -> None:
    assert count(num_train_epochs=4, num_microbatches=2) == count(num_train_epochs=4) == 10


class Stopper(Messages):
    """Sends SIGTERM to this process at a step."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def step(self, record: Record) -> None:
        if record.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that training reads."""
    numbers, real = list[int](), TextInput.rows

    def rows(self: TextInput, wanted: np.ndarray) -> Any:
        numbers.extend(wanted.tolist())
        return real(self, wanted)

    monkeypatch.setattr(TextInput, "rows", rows)
    return numbers


def test_a_run_of_epochs_reads_each_row_as_often_and_is_the_run_of_so_many_steps(
    tmp_path: pathlib.Path, text: dict[str, Any], rows_read: list[int], pax_here: Callable
) -> None:
    """It is stopped in between, and the learning rate decays to its end."""
    recipe = pax.load("tiny", set={**SMALL, **text, "num_train_epochs": 3})
    options = [f"--set={path}={json.dumps(value)}" for path, value in {**SMALL, **text}.items()]

    def dry_run(*more: str) -> dict[str, Any]:
        done = pax_here("train", *more, "--run-dir=run", "--dry-run", "--json")
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout)

    planned = dry_run("tiny", *options, "--set=num_train_epochs=3")
    assert (planned["would"], planned["steps"]) == ("start", 8) and not (tmp_path / "run").exists()
    started = Stopper(at=3)
    with pytest.raises(Stopped):
        pax.train(recipe, "run", progress=started)
    assert started.facts["num_train_steps"] == 8
    done = pax.Run("run").steps[-1]
    assert 3 <= done < 8 and len(rows_read) == 4 * done
    assert dry_run("tiny", *options, "--set=num_train_epochs=3")["would"] == f"resume at step {done}"
    result = pax.train(recipe, "run", progress=Messages()).result
    assert result is not None and result["steps"] == 8
    assert Counter(rows_read[:30]) == dict.fromkeys(range(10), 3) and len(rows_read) == 32
    assert all(Counter(rows_read[at : at + 10]) == dict.fromkeys(range(10), 1) for at in (0, 10, 20))

    pax.train(pax.load("tiny", set={**SMALL, **text, "num_train_steps": 8}), "steps", progress=Messages())
    assert losses(tmp_path / "run") == losses(tmp_path / "steps")
    rates = [pax.Run(run_dir).metrics()["learning_rate"].tolist() for run_dir in ("run", "steps")]
    assert rates[0] == rates[1]

    # The run knows its steps, without the data; a different number of epochs is a changed recipe.
    again = pax.load(tmp_path / "run")
    assert (again.values[STEPS].value, again.values[EPOCHS].value) == (8, None)
    assert list(pax.Run("run", recipe).watch())[-1] == 8
    with pytest.raises(ConfigError, match=r"num_train_steps: 8 → 10"):
        pax.train(pax.load("run", set={"num_train_epochs": 4}), "run", progress=Messages())
    file, finished = pathlib.Path(text["train_input.files"][0]), Messages()
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    pax.train("run", progress=finished)
    assert "is finished" in finished.lines[0]
    file.write_text("".join(lines[:9]))
    before = {name: (tmp_path / "run" / name).read_text() for name in ("recipe.yaml", "config.txt", "environment.json")}
    with pytest.raises(DataError, match="its data has changed"):
        pax.train(pax.load("run", set={"num_train_epochs": 4}), "run", allow_changed=True, progress=Messages())
    assert before == {name: (tmp_path / "run" / name).read_text() for name in before}  # it did not resume
    file.write_text("".join(lines))
    longer = pax.train(pax.load("run", set={"num_train_epochs": 4}), "run", allow_changed=True, progress=Messages())
    assert longer.result is not None and longer.result["steps"] == 10 and len(rows_read[-8:]) == 8
    assert Counter(rows_read[:32] + rows_read[-8:]) == dict.fromkeys(range(10), 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_input.num_examples": None}, "Input `train`: SyntheticInput has no known number of rows"),
        (
            {"train_input": "MixtureInput", "train_input.inputs": ["StdlibInput"], "train_input.weights": [1]},
            "Input `train`: MixtureInput has no known number of rows",
        ),
        ({"num_train_steps": 8}, r"Both `num_train_steps` \(8\) and `num_train_epochs` \(2.0\) are set"),
        ({"num_train_epochs": None, "num_train_steps": None}, "Neither `num_train_steps` nor `num_train_epochs` is"),
        ({"num_train_epochs": 1e300}, "num_train_steps must be at least 1 and at most 2147483647"),
        ({"global_batch_size": None}, "Neither `global_batch_size` nor `percore_batch_size` is set"),
    ],
)
def test_what_cannot_be_counted_is_an_error(tmp_path: pathlib.Path, values: dict[str, Any], message: str) -> None:
    inputs = {} if "train_input" in values else SYNTHETIC
    with pytest.raises(ConfigError, match=message):
        pax.train(pax.load("tiny", set={**SMALL, **inputs, "num_train_epochs": 2, **values}), tmp_path / "run")


def test_steps_to_trace_are_among_those_that_are_counted(tmp_path: pathlib.Path) -> None:
    recipe = pax.load("tiny", set={**SMALL, **SYNTHETIC, "num_train_epochs": 2})
    with pytest.raises(ConfigError, match="--profile-steps 4:6: the run has 5 steps"):
        pax.train(recipe, tmp_path / "run", profile_steps="4:6", progress=Messages())


def test_the_later_of_steps_and_epochs_counts(tmp_path: pathlib.Path) -> None:
    overlay = tmp_path / "epochs.yaml"
    overlay.write_text("task.train.num_train_epochs: 3\n")
    values = pax.load("tiny", overlay).values
    assert (values[STEPS].value, values[EPOCHS].value) == (None, 3.0)
    values = pax.load("tiny", overlay, set={"num_train_steps": 20}).values
    assert (values[STEPS].value, values[EPOCHS].value) == (20, None)


def test_commands_that_do_not_train_read_no_data(pax_here: Callable) -> None:
    options = ("--set=train_input=TextInput", "--set=train_input.files=[missing.txt]", "--set=num_train_epochs=2")
    for verb in (("recipes", "show"), ("compile", "--topology=cpu:1", "--set=num_layers=1")):
        done = pax_here(*verb, "tiny", *options)
        assert done.returncode == 0, done.stderr
    assert pax_here("train", "tiny", *options, "--dry-run").returncode == 5
