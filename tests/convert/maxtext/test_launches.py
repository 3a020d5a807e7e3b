"""Launches of all years have the values of MaxText's own files of their days, as have the recipes made of them."""

from __future__ import annotations

import pathlib

import pytest
import yaml

from paxcli.convert.maxtext.launch_to_recipe import convert
from paxcli.convert.maxtext.shell import read_script

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "maxtext_launches.yaml"
LAUNCHES = yaml.safe_load(DATA.read_text())
SAME = {
    "task.model.max_seq_len": "max_target_length",
    "task.train.num_train_steps": "steps",
    "task.train.summary_interval_steps": "log_period",
    "task.model.vocab_size": "vocab_size",
    "task.model.dims_per_head": "head_dim",
    "task.train.learner.learning_rate": "learning_rate",
    "task.train.learner.optimizer.beta2": "adam_b2",
    "task.train.learner.optimizer.weight_decay": "adam_weight_decay",
    "task.train.learner.clip_gradient_norm_to_value": "gradient_clipping_threshold",
}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch['date']}")
def test_a_launch_has_the_values_of_its_day(launch: dict) -> None:
    (found,) = read_script(launch["command"]).launches
    topology = "v4-128" if "0.5" in launch["command"] else None
    converted = convert(found, "run.sh", date=launch["date"], topology=topology)
    expected = launch["values"]
    assert {key: converted.settings[key] for key in expected} == expected
    for path, key in SAME.items():
        if key in expected:
            assert converted.values[path] == expected[key], path


def test_there_are_launches_of_every_year() -> None:
    assert len(LAUNCHES) == 40 and {launch["date"].year for launch in LAUNCHES} == {2023, 2024, 2025, 2026}
