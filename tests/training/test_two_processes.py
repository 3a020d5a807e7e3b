"""Two processes of four devices train like one process of eight."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from tests.devices import cpu_devices
from tests.jobs import free_port, job_variables
from tests.training.runs import evals, losses, small

SEED = "train_input.input_random_seed"


def _recipe(steps: int = 20, seed: int | None = None, mesh: str | None = "{data: 2, fsdp: 4}") -> list[str]:
    changes = {"num_train_steps": steps, "eval_interval_steps": None, SEED: seed}
    changes |= {"eval_inputs.0.batch_size": None}  # which is that of a process
    return small(**changes, **({"ici_mesh_shape": mesh} if mesh else {}))


def _start(run_dir, index: int, port: int, *arguments: str, recipe: str = "tiny-synthetic") -> subprocess.Popen:
    env = {**os.environ, **cpu_devices(4), **job_variables(port, index)}
    command = [sys.executable, "-m", "paxcli", "train", recipe, *arguments, "--run-dir", str(run_dir)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, pax):
    port, arguments = free_port(), [*_recipe(), "--profile-steps=5:8"]
    with (
        _start(tmp_path / "two", 0, port, *arguments) as first,
        _start(tmp_path / "two", 1, port, *arguments) as second,
    ):
        outputs = [process.communicate(timeout=600) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "Next: pax plot" in outputs[0][0] and "Next: pax plot" not in outputs[1][0]  # only the first reports
    assert not any("Gloo" in stdout for stdout, _ in outputs)  # whose reports are no part of a result
    assert not any(line.startswith("step ") for line in outputs[1][1].splitlines())
    assert ("Traced:" in outputs[0][1], "Traced:" in outputs[1][1]) == (True, False)
    assert len(list((tmp_path / "two" / "profile").glob("**/*.xplane.pb"))) == 1

    # The seed that the two agreed on is in their run's recipe.
    seed = yaml.safe_load((tmp_path / "two" / "recipe.yaml").read_text())["set"][SEED]
    one = pax("train", "tiny-synthetic", *_recipe(seed=seed), "--run-dir=one", devices=8)
    assert one.returncode == 0, one.stderr
    two_losses, one_losses = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert two_losses.keys() == one_losses.keys()
    np.testing.assert_allclose(list(two_losses.values()), list(one_losses.values()), rtol=1e-5)
    np.testing.assert_allclose(evals(tmp_path / "two")[20]["loss"], evals(tmp_path / "one")[20]["loss"], rtol=1e-5)

    # What two processes saved, one goes on from.
    resumed = pax("train", "tiny-synthetic", *_recipe(30, mesh=None), "--run-dir=two", "--allow-changed")
    assert resumed.returncode == 0, resumed.stderr
    assert max(losses(tmp_path / "two")) == 30


@pytest.mark.slow
def test_two_processes_continue_sample_prompts_like_one(tmp_path, pax):
    port, run_dir = free_port(), tmp_path / "run"
    samples = ["--set=sample_prompts=[the, import]", "--set=decoding.max_tokens=5"]
    arguments = [*small(num_train_steps=10, ici_mesh_shape="{fsdp: 8}"), *samples]
    with (
        _start(run_dir, 0, port, *arguments, recipe="tiny") as first,
        _start(run_dir, 1, port, *arguments, recipe="tiny") as second,
    ):
        outputs = [process.communicate(timeout=600) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    texts = [json.loads(line)["text"] for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    one = pax("decode", "run", "--set=ici_mesh_shape=null", "--prompt=the", "--prompt=import", "--json")
    assert one.returncode == 0, one.stderr
    assert [output["text"] for output in json.loads(one.stdout)["outputs"]] == texts
