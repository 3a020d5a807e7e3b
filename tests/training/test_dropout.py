"""Runs with dropout: resumed, on several devices, with parts of several kinds, and where there can be none."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import paxcli as pax
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from tests.training.runs import final_arrays, losses, on_meshes

SMALL = ["num_layers=2", "model_dims=32", "hidden_dims=64", "max_seq_len=16"]
RATES = ["residual_dropout_prob=0.2", "relu_dropout_prob=0.1", "atten_dropout_prob=0.1", "input_dropout_prob=0.1"]


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: pathlib.Path) -> None:
    def train(name: str, steps: int) -> None:
        values: dict[str, Any] = dict(assignment.split("=") for assignment in [*SMALL, *RATES])
        values |= {"num_train_steps": steps, "eval_inputs": [], "schedule": "Constant", "summary_interval_steps": 1}
        numbers = {name: float(x) if "." in str(x) else int(x) for name, x in values.items() if str(x)[:1].isdigit()}
        pax.train(pax.load("tiny-synthetic", set=values | numbers), tmp_path / name, allow_changed=True)

    train("straight", 4)
    for steps in (2, 4):
        train("resumed", steps)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    expected = final_arrays(tmp_path / "straight")
    for name, array in final_arrays(tmp_path / "resumed").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_eight_devices_compute_what_one_computes(tmp_path: pathlib.Path) -> None:
    sets = [*SMALL, *RATES, "learning_rate=0.01", "schedule=Constant"]
    case = {"recipe": "tiny-synthetic", "sets": sets, "steps": 3}
    one = on_meshes(tmp_path, 1, [case])[0]
    for found in on_meshes(tmp_path, 8, [{**case, "sets": [*sets, "ici_mesh_shape=[2,2,2]"]}]):
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-5)


def test_the_name_alone_sets_all_parts_of_a_model() -> None:
    config = resolve("sequence-synthetic", sets=["atten_dropout_prob=0.1", "residual_dropout_prob=0.2"]).config
    encoder, decoder = config.task.model.encoder.block, config.task.model.decoder.block
    for attention in (encoder.attention, decoder.attention, decoder.cross_attention):
        assert attention.atten_dropout_prob == 0.1
    assert encoder.residual_dropout_prob == decoder.residual_dropout_prob == 0.2
    config = resolve("tiny", sets=["residual_dropout_prob=0.2", "block=ParallelBlock"]).config
    assert config.task.model.stack.block.residual_dropout_prob == 0.2


@pytest.mark.parametrize("rate", ["1", "-0.1"])
def test_a_rate_is_below_one(rate: str) -> None:
    with pytest.raises(ConfigError, match="residual_dropout_prob must be at least 0 and below 1"):
        resolve("tiny", sets=[f"residual_dropout_prob={rate}"])


@pytest.mark.parametrize("field", ["residual_dropout_prob", "relu_dropout_prob", "atten_dropout_prob", "lora.dropout"])
def test_pipeline_stages_refuse_it_by_name(field: str) -> None:
    values = {"stack": "PipelinedStack", "num_stages": 2, "stack.num_microbatches": 2, "num_layers": 2}
    lora = {"task.model.lora": "Lora"} if field.startswith("lora") else {}
    with pytest.raises(ConfigError, match=rf"no dropout, and task\.model\..*{field}=0\.1"):
        pax.load("tiny-synthetic", set={**values, **lora, field: 0.1}).validate()
    pax.load("tiny-synthetic", set={**values, "input_dropout_prob": 0.1}).validate()  # not a stage's
