"""Runs of the same command, and runs whose directory was damaged in between."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

import paxcli as pax
from paxcli.errors import ConfigError, DataError
from tests.training.runs import losses

_SIZES = {"num_layers": 1, "model_dims": 16, "hidden_dims": 32, "num_heads": 1, "max_seq_len": 16}
_SIZES |= {"global_batch_size": 4, "summary_interval_steps": 1, "warmup_steps": 1}


class Messages:
    """A reporter that keeps messages and facts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}

    def start(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def step(self, record: Any) -> None:
        pass

    def evaluation(self, step: int, metrics: Any) -> None:
        pass

    def message(self, text: str) -> None:
        self.lines.append(text)


def train(run_dir: pathlib.Path, steps: int = 2, **sets: Any) -> Messages:
    """Trains a very small model in this process."""
    progress = Messages()
    values = {**_SIZES, "num_train_steps": steps, "save_interval_steps": 1, "eval_inputs": [], **sets}
    pax.train(pax.load("tiny", set=values), run_dir, allow_changed=True, progress=progress)
    return progress


def test_the_same_command_is_the_same_run(tmp_path: pathlib.Path) -> None:
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert first.facts["data_seed"] == second.facts["data_seed"] == 1234
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses_of(tmp_path / "c", random_seed=7)


def losses_of(run_dir: pathlib.Path, **sets: Any) -> dict[int, float]:
    train(run_dir, **sets)
    return losses(run_dir)


def test_a_drawn_seed_is_recorded_and_resumed(tmp_path: pathlib.Path) -> None:
    seed = train(tmp_path / "a", random_seed=None).facts["data_seed"]
    assert seed != train(tmp_path / "b", random_seed=None).facts["data_seed"]
    assert f"task.train.random_seed: {seed}" in (tmp_path / "a" / "recipe.yaml").read_text()
    assert train(tmp_path / "a", steps=3, random_seed=None).facts["data_seed"] == seed


def test_a_checkpoint_has_all_that_a_resume_needs(tmp_path: pathlib.Path) -> None:
    seed = train(tmp_path / "a", random_seed=None).facts["data_seed"]
    for name in ("config.txt", "recipe.yaml", "environment.json"):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(ConfigError, match=r"(?s)started with another recipe.*clip_gradient_norm"):
        pax.train(
            pax.load("tiny", set={**_SIZES, "eval_inputs": [], "clip_gradient_norm_to_value": 0.5}), tmp_path / "a"
        )
    assert train(tmp_path / "a", steps=3, random_seed=None).facts["data_seed"] == seed


@pytest.mark.parametrize("content", [b"", b"task.model.dtype = flo", b"a = 1\n\xff\xfe"])
def test_a_damaged_config_is_unusable_data_with_a_way_out(tmp_path: pathlib.Path, content: bytes) -> None:
    train(tmp_path / "a")
    (tmp_path / "a" / "config.txt").write_bytes(content)
    with pytest.raises(DataError, match="config.txt is damaged") as caught:
        train(tmp_path / "a", steps=3)
    assert "delete it" in str(caught.value.hint)
    (tmp_path / "a" / "config.txt").unlink()
    assert "at step 2" in train(tmp_path / "a", steps=3).lines[0]


def test_a_manifest_without_a_recipe_can_be_read(tmp_path: pathlib.Path) -> None:
    """As earlier versions wrote it."""
    from paxcli.checkpoint.manifest import _checksum

    train(tmp_path / "a")
    (tmp_path / "a" / "config.txt").unlink()
    file = tmp_path / "a" / "checkpoints" / "2" / "manifest" / "metadata"
    content = json.loads(file.read_text())["content"]
    assert content.pop("recipe")["task.model.model_dims"] == 16
    content["format"] = 1
    file.write_text(json.dumps({"checksum": _checksum(content), "content": content}))
    assert "at step 2" in train(tmp_path / "a", steps=3).lines[0]
