"""`init_rename` and `init_ignore`: a new run starts from the parameters of another model."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

import paxcli
from paxcli.checkpoint.reading import read_arrays, read_manifest
from paxcli.errors import ConfigError
from paxcli.training.loop import resume_step
from paxcli.training.progress import Reporter
from paxcli.training.run_dir import RunDir

SMALL: dict[str, Any] = {"num_layers": 1, "model_dims": 32, "hidden_dims": 64, "max_seq_len": 16, "num_train_steps": 1}
SMALL |= {"eval_inputs": [], "global_batch_size": 8, "learning_rate": 0.0}
ATTENTION = "stack/layers/attention/"


def options(**changes: Any) -> list[str]:
    return [f"--set={path}={json.dumps(value)}" for path, value in {**SMALL, **changes}.items()]


def params_of(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """The parameters of the checkpoint of step 1, by path."""
    step_dir = epath.Path(run_dir) / "checkpoints" / "1"
    manifest = read_manifest(step_dir)
    params = {name: x for name, x in manifest.arrays.items() if name.startswith("params.")}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = read_arrays(step_dir, manifest, {name: x.abstract(here) for name, x in params.items()})
    return {name.removeprefix("params.").replace(".", "/"): np.asarray(x) for name, x in arrays.items()}


def test_parameters_are_renamed_and_left_out_on_eight_devices(tmp_path: pathlib.Path, pax: Any) -> None:
    """The learning rate is 0: the checkpoint of step 1 has the parameters that the run started with."""
    mesh = {"ici_mesh_shape": {"fsdp": 4, "tensor": 2}}
    rules = {"init_rename": {f"{ATTENTION}(query|key)": f"{ATTENTION}value"}, "init_ignore": ["^head/", "w_in$"]}
    runs = {
        "source": (1, options(random_seed=1, vocab_size=300)),
        "fresh": (1, options(random_seed=2, head="OutputHead")),
        "warm": (8, [*options(random_seed=2, head="OutputHead", **mesh, **rules), "--from=source"]),
    }
    for name, (devices, words) in runs.items():
        done = pax("train", "tiny-synthetic", *words, f"--run-dir={name}", devices=devices)
        assert done.returncode == 0, done.stderr
    report = [line.strip() for line in done.stderr.splitlines()]
    assert "Matched by `init_ignore`, randomly initialized: `head/w`, `stack/layers/feed_forward/w_in`." in report
    text = "`embedding/table` is float[300, 32] there, float[259, 32] here"
    assert f"Another shape or dtype, randomly initialized: {text}." in report
    source, fresh, warm = (params_of(tmp_path / name) for name in runs)
    expected = {name: fresh[name] for name in ("head/w", "stack/layers/feed_forward/w_in", "embedding/table")}
    expected |= {ATTENTION + name: source[f"{ATTENTION}value"] for name in ("query", "key", "value")}
    rest = {name: source[name] for name in warm.keys() - expected.keys()}
    assert len(rest) == 10
    assert warm.keys() == fresh.keys()
    for name, array in (expected | rest).items():
        np.testing.assert_array_equal(warm[name], array, err_msg=name)
    refused = pax("train", "tiny-synthetic", *options(**rules), "--from=source", "--run-dir=new", "--dry-run")
    assert refused.returncode == 2 and "init_ignore: '^head/' matches no parameter" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_rules_belong_to_the_start_of_a_run_from_another(tmp_path: pathlib.Path) -> None:
    def recipe(steps: int, **sets: Any) -> paxcli.Recipe:
        return paxcli.load("tiny-synthetic", set=SMALL | {"num_train_steps": steps} | sets)

    def train(name: str, recipe: paxcli.Recipe, **more: Any) -> paxcli.Run:
        return paxcli.train(recipe, tmp_path / name, progress=Reporter(), **more)

    rules = {"init_rename": {"final_norm/scale": "final_norm/bias"}, "init_ignore": ["attention/"]}
    first = recipe(1, **rules)
    train("old", recipe(1))
    for start in (
        lambda: train("new", first),
        lambda: train("new", first, init_from=tmp_path / "old", with_optimizer=True),
        lambda: resume_step(first.config, first.yaml(), RunDir(tmp_path / "new")),
    ):
        with pytest.raises(ConfigError, match="are rules of `--from RUN_DIR`, without `--with-optimizer`") as refused:
            start()
        assert "`--set init_rename=null --set init_ignore=[]`" in str(refused.value.hint)
    train("new", first, init_from=tmp_path / "old")
    assert not params_of(tmp_path / "new")["final_norm/scale"].any()
    # It resumes without `--from`, and with the rules that it started with.
    train("new", recipe(2, **rules), allow_changed=True)
    with pytest.raises(ConfigError, match="init_ignore"):
        train("new", recipe(3), allow_changed=True)
    # What is wrong is found before a step is compiled or data is read.
    broken = recipe(1, init_rename={"final_norm/scale": "final_norm/scales"}, global_batch_size=4)
    with pytest.raises(ConfigError, match="lacks it. Did you mean `final_norm/scale`"):
        train("broken", broken, init_from=tmp_path / "old")
    assert not (tmp_path / "broken" / "recipe.yaml").exists()
