"""`--from RUN_DIR[@STEP]`."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.warm_start import load_params, parse_source
from paxcli.errors import ConfigError, DataError
from tests.checkpoint.states import assert_same_bits, make_state


@pytest.fixture
def run_dir(tmp_path):
    with CheckpointStore(tmp_path / "old" / "checkpoints", Checkpoint(save_interval_steps=1)) as store:
        for step in (1, 2):
            store.save(step, make_state(step), {"position": step})
    return tmp_path / "old"


def test_sources():
    assert parse_source("runs/a") == ("runs/a", None)
    assert parse_source("runs/a@7") == ("runs/a", 7)
    assert parse_source("gs://me@there/runs/a") == ("gs://me@there/runs/a", None)
    with pytest.raises(ConfigError):
        parse_source("runs/a@last")


def test_parameters_alone_or_everything(run_dir):
    fresh = make_state(9)
    params, report = load_params(run_dir, None, fresh.params)
    assert_same_bits(params, make_state(2).params)
    assert sorted(report.arrays.matched) == ["decoder/b", "decoder/w", "table"]
    assert not report.arrays
    everything, report = load_params(run_dir, 1, fresh, what="all")
    assert_same_bits(everything, make_state(1))
    assert report.text() == f"Loaded {len(report.arrays.matched)} arrays from {run_dir}/checkpoints/1."


def test_mismatched_arrays_stay_initialized_and_are_reported(run_dir):
    fresh = {**make_state(9).params, "head": jnp.ones((2, 2)), "table": jnp.ones((300, 32), jnp.bfloat16)}
    del fresh["decoder"]["b"]
    params, report = load_params(run_dir, 2, fresh)
    assert_same_bits(params["decoder"], {"w": make_state(2).params["decoder"]["w"]})
    assert_same_bits({k: params[k] for k in ("head", "table")}, {k: fresh[k] for k in ("head", "table")})
    assert report.arrays.matched == ["decoder/w"] and report.arrays.missing == ["head"]
    assert report.arrays.unexpected == ["decoder/b"]
    assert list(report.arrays.mismatched.values()) == ["`table` is float[259, 32] there, float[300, 32] here"]
    assert len(report.text().splitlines()) == 4


def test_no_matching_array_is_an_error(run_dir, tmp_path):
    with pytest.raises(DataError, match="No array in .* matches"):
        load_params(run_dir, 2, {"other": jnp.zeros(3)})
    with pytest.raises(DataError, match="no checkpoint of step 7") as caught:
        load_params(run_dir, 7, make_state().params)
    assert caught.value.hint == "It has: 1, 2."
    with pytest.raises(DataError, match="has no checkpoint"):
        load_params(tmp_path / "nowhere", None, make_state().params)


def test_a_damaged_checkpoint_is_an_error(run_dir):
    for file in (run_dir / "checkpoints" / "2" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="checkpoints/2 is unusable"):
        load_params(run_dir, 2, make_state().params)
