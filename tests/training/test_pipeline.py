"""Pipelined training: on eight devices as on one, from configuration to generated text."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import yaml

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.training.validate import validate
from tests.devices import cpu_devices
from tests.training.runs import losses, small

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cases", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_on_eight_devices(cases):
    """Stages × microbatches × rounds × meshes, each remat policy, against the plain stack on one device."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | cpu_devices(8)
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.pipelines", cases],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(" ok in ") == {"some": 5, "all": 16}[cases]


@pytest.mark.slow
def test_trains_evaluates_and_decodes(pax, tmp_path):
    """The run of eight devices has the losses of one; and one device continues its text."""
    options = small(num_layers=4, num_train_steps=10, eval_interval_steps=None)
    options += [
        "--set=task.model.stack=PipelinedStack",
        "--set=num_stages=2",
        "--set=microbatch_size=2",
        "--set=circular_repeat=2",
        "--set=summary_interval_steps=1",
        "--set=task.train.learner.optimizer=Adam",
    ]
    mesh = "--set=ici_mesh_shape=[2, 1, 2, 2]"
    for name, more, devices in (("eight", [mesh], 8), ("one", [], 1)):
        done = pax("train", "tiny", *options, *more, "--run-dir", name, "--json", devices=devices)
        assert done.returncode == 0, done.stderr
    eight, one = losses(tmp_path / "eight"), losses(tmp_path / "one")
    assert len(eight) == 10
    np.testing.assert_allclose(list(eight.values()), list(one.values()), rtol=1e-5)
    recipe = yaml.safe_load((tmp_path / "eight" / "recipe.yaml").read_text())
    recipe["set"] = {path: value for path, value in recipe["set"].items() if "ici_mesh_shape" not in path}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(recipe))
    asked = ("--prompt", "def ", "--max-tokens", "6", "--temperature", "0", "--json")
    on_one = pax("decode", "one.yaml", "--run-dir", "eight", *asked)
    assert on_one.returncode == 0, on_one.stderr
    assert len(json.loads(on_one.stdout)["outputs"][0]["ids"]) == 6


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        ([2, 1, 2, 2], {}, None),
        (None, {}, None),
        ({"fsdp": 4}, {"num_stages": 4}, None),
        ([4, 1, 1, 1], {}, "num_stages=2, but the mesh has stage=4"),
        ([2, 1, 1, 1], {"num_stages": 3}, r"num_layers=4 does not divide into num_stages=3 \(4 / 3 = 1.33333\)"),
        ([2, 1, 1, 1], {"num_microbatches": 3}, r"8 rows does not divide by num_microbatches=3 \(8 / 3 = 2.66667\)"),
    ],
)
def test_pipelines_that_do_not_fit(mesh, fields, message):
    config = tiny_synthetic()
    config.task.model.stack = PipelinedStack.partial(**{"num_stages": 2, "num_microbatches": 4, **fields})
    config.mesh.ici_mesh_shape = mesh
    if message is None:
        return validate(config)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_what_else_must_fit():
    config = tiny_synthetic()
    config.mesh.ici_mesh_shape = [2, 1, 1, 1]
    with pytest.raises(ConfigError, match="the model has no pipeline stages"):
        validate(config)
    config.task.model.stack = PipelinedStack.partial(num_stages=2, num_microbatches=4)
    config.task.train.num_microbatches = 4  # gradients are accumulated over slices of 2 rows
    with pytest.raises(ConfigError, match="2 rows does not divide by num_microbatches=4"):
        validate(config)
    config.task.train.num_microbatches = 1
    config.eval_inputs[0].batch_size = 6
    with pytest.raises(ConfigError, match="6 rows does not divide by num_microbatches=4"):
        validate(config)
