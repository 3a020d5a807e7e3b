"""Pax's recipes on this machine, as a user meets them."""

from __future__ import annotations

import json
import pathlib

import pytest

from paxcli.config.resolve import resolve
from paxcli.training.experiment import global_batch_size, num_devices
from paxcli.training.validate import validate
from tests.training.runs import losses


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("c4-gpt3-xl", "lm-cloud-2b-limit-steps", "LmCloudTransformerAdamLimitSteps")
    ],
)
def test_the_overlays_make_it_run_here(recipe: str, tmp_path: pathlib.Path, pax) -> None:
    overlays = ("--overlay", "cpu", "--overlay", "synthetic-data")
    smaller = ("--set", "num_train_steps=20", "--set", "max_seq_len=32")
    done = pax("train", recipe, *overlays, *smaller, "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    series = losses(tmp_path / "run")
    assert series[20] < series[1] - 0.1


@pytest.mark.parametrize(("overlay", "devices"), [("gpu-1", 1), ("gpu-8", 8)])
def test_recipes_for_gpus_fit_theirs(overlay: str, devices: int) -> None:
    """The rows on each device are the recipe's, whatever their number."""
    for name in ("gpt2-124m", "gpt2-1.5b", "llama-1b", "llama2-7b", "llama3-8b", "c4-1b", "lm-cloud-pipeline-9b"):
        config = resolve(name, [overlay, "synthetic-data"]).config
        validate(config)
        assert num_devices(config) == devices
        assert global_batch_size(config, devices) == devices * config.task.train.percore_batch_size


def test_too_few_devices(pax_here) -> None:
    done = pax_here("train", "c4-1b", "--overlay", "synthetic-data", "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2 and error["message"] == "mesh fsdp=4 needs 4 devices, found 1."
    assert "--overlay cpu" in error["hint"]


def test_no_data(tmp_path: pathlib.Path, pax) -> None:
    """Known before any device is touched: a backend that does not exist is not even looked for."""
    done = pax("train", "c4-1b", "--json", env={"JAX_PLATFORMS": "nothing"})
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2, done.stdout
    assert "path is None" in error["message"] and "--overlay synthetic-data" in error["hint"]
    assert "train_input.c4.path" in error["hint"]

    done = pax("train", "c4-1b", "--set", "c4.path=x", "--json")
    assert done.returncode == 2 and "c4.tokenizer_path" in json.loads(done.stdout)["error"]["hint"]


def test_the_fields_in_which_1b_and_2b_differ(pax_here) -> None:
    done = pax_here("recipes", "diff", "c4-1b", "C4Spmd2BAdam4Replicas", "--json")
    assert json.loads(done.stdout)["differences"] == {
        "parameters": {"a": 1_104_619_904, "b": 2_137_273_856},
        "flops_per_step": {"a": pytest.approx(8.95e14, rel=0.01), "b": pytest.approx(1.72e15, rel=0.01)},
        "task.model.num_layers": {"a": 13, "b": 18},
        "task.model.model_dims": {"a": 2560, "b": 3072},
        "task.model.hidden_dims": {"a": 10240, "b": 12288},
        "task.model.num_heads": {"a": 20, "b": 24},
    }
