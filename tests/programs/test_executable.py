"""Compiled steps saved to a file."""

from __future__ import annotations

import json
import zipfile

import jax
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.programs.executable import load_executable
from paxcli.programs.serialization import SerializedProgram

TRAINED = ("--set", "train_input=SyntheticInput", "--set", "num_layers=1", "--set", "num_train_steps=3")
TRAINED += ("--set", "eval_inputs=[]", "--set", "train_input.input_random_seed=7")


@pytest.mark.slow
def test_a_saved_step_trains_like_one_compiled_in_the_run(pax, tmp_path) -> None:
    saved = pax("compile", "tiny", "--topology", "cpu:2", "--save", "step.pax", *TRAINED, "--json")
    assert saved.returncode == 0, saved.stderr
    assert json.loads(saved.stdout)["fits"]
    for run, extra in (("loaded", ("--compiled", "step.pax")), ("compiled", ())):
        done = pax("train", "tiny", *TRAINED, *extra, "--run-dir", run, devices=2)
        assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("loaded", "compiled")
    ]
    assert losses[0] == losses[1] and len(losses[0]) >= 1

    other = pax("train", "tiny", *TRAINED, "--set", "learning_rate=0.5", "--compiled", "step.pax", devices=2)
    assert other.returncode == 2
    assert "task.train.learner.learning_rate: 0.01 → 0.5" in other.stderr

    setting = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    other = pax("train", "tiny", *TRAINED, "--compiled", "step.pax", "--run-dir=other", devices=2, env=setting)
    assert other.returncode == 2
    assert "jax_default_matmul_precision: None → highest" in other.stderr

    _check_damaged_files(tmp_path / "step.pax")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_program_that_calls_python_is_refused(ordered: bool) -> None:
    """XLA would serialize it, and running what it loads from that would crash the process."""

    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x, ordered=ordered)
        return x + 1

    with pytest.raises(ConfigError, match="that calls Python, as `jax.debug.print` does, cannot be saved"):
        SerializedProgram.of(jax.jit(step).lower(1.0).compile())


def _check_damaged_files(path) -> None:
    with zipfile.ZipFile(path) as file:
        assert set(file.namelist()) == {"manifest.json", "executable"}
        manifest, executable = json.loads(file.read("manifest.json")), file.read("executable")
    whole = path.read_bytes()
    for damaged in (b"nothing", whole[:100], whole[:-30], whole[:2000] + bytes(200) + whole[2200:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is not a compiled step"):
            load_executable(path, None)
    texts = ["", "[]", "3", "null", "[" * 100_000, json.dumps({**manifest, "made_for": 7})]
    texts += [json.dumps({**manifest, "arguments": value}) for value in (None, "0", [0], [99_999])]
    for text in texts:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("manifest.json", text)
            file.writestr("executable", executable)
        with pytest.raises(DataError, match="is not a compiled step|is damaged"):
            load_executable(path, None)
