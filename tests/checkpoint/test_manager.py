"""Saving and restoring: save interval, retention, meshes, donated buffers, read-only stores."""

from __future__ import annotations

import datetime
import os
import pathlib
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

from paxcli.checkpoint import fingerprint, manager
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.errors import DataError
from tests.checkpoint.states import State, abstract, assert_same_bits, make_state
from tests.devices import cpu_devices

ON_MESHES = pathlib.Path(__file__).with_name("on_meshes.py")


@pytest.fixture
def state() -> State:
    return make_state()


def test_round_trip_with_save_interval_and_retention(tmp_path, state):
    policy = Checkpoint(save_interval_steps=2, save_max_to_keep=2, save_keep_interval_steps=6)
    assert not (tmp_path / "run").exists()
    with CheckpointStore(tmp_path / "run", policy) as store:
        assert store.steps() == [] and store.latest_step() is None
        saved = [step for step in range(15) if store.save(step, make_state(step), {"position": step})]
        assert saved == [2, 4, 6, 8, 10, 12, 14]
        assert store.save(15, make_state(15), {"position": 15}, force=True)
        assert not store.save(15, make_state(15), {"position": 15}, force=True)
        store.wait()
        assert store.steps() == [6, 12, 14, 15] and store.latest_step() == 15
        restored, input_state = store.restore(12, abstract(state))
        assert_same_bits(restored, make_state(12))
        assert input_state == {"position": 12}
    assert store.steps() == [6, 12, 14, 15]


def test_one_checkpoint_a_span_of_time_is_kept(tmp_path, state):
    policy = Checkpoint(save_interval_steps=1, save_max_to_keep=1, save_keep_interval_duration="1s")
    with CheckpointStore(tmp_path, policy) as store:
        for step in (1, 2, 3):
            store.save(step, state, {})
        time.sleep(1.1)
        for step in (4, 5):
            store.save(step, state, {})
    assert store.steps() == [1, 4, 5]


def test_a_fraction_of_a_second_between_checkpoints_counts():
    """0.5 s was 0 s, which kept every checkpoint."""
    *_, by_time = manager._preservation_policy(Checkpoint(save_keep_interval_duration="0.5s")).policies
    times = [datetime.datetime(2026, 1, 1, microsecond=100_000 * tenths) for tenths in (0, 2, 4, 6, 8)]
    saved = [types.SimpleNamespace(step=step, time=time) for step, time in enumerate(times)]
    found = by_time.should_preserve(saved, context=None)
    assert found == [True, False, False, True, False]


def test_a_save_has_the_values_at_the_time_of_the_call(tmp_path):
    state = {"w": jnp.zeros((256, 1024)), "step": jnp.int32(0)}
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1, save_max_to_keep=None)) as store:
        for step in range(1, 6):
            state = advance(state)
            store.save(step, state, {})
            for _ in range(0 if step == 5 else 3):
                state = jax.tree.map(lambda x: x - 1, advance(state))
        shapes = abstract(state)
        for step in range(1, 6):
            restored, _ = store.restore(step, shapes)
            assert int(restored["step"]) == step and float(restored["w"].min()) == float(restored["w"].max()) == step


def test_training_continues_before_the_fingerprints_are_computed(tmp_path, state, monkeypatch):
    returned = threading.Event()

    def start(arrays):
        assert not returned.is_set()
        finish = fingerprint.start_fingerprints(arrays)
        return lambda: finish() if returned.wait(60) else pytest.fail("the save waits for them")

    monkeypatch.setattr(manager, "start_fingerprints", start)
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1)) as store:
        store.save(1, state, {})
        assert store.steps() == []
        returned.set()
        store.wait()
        assert_same_bits(store.restore(1, abstract(state))[0], state)


def test_a_reader_does_not_disturb_a_save_in_progress(tmp_path, state):
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1)) as store:
        store.save(1, state, {})
        store.wait()
        under_way = tmp_path / "2.orbax-checkpoint-tmp-1"
        under_way.mkdir()
        reader = CheckpointStore(tmp_path)
        assert reader.steps() == [1]
        assert_same_bits(reader.restore(1, abstract(state))[0], state)
        assert under_way.exists()
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1)) as store:
        store.save(2, state, {})
    assert not under_way.exists() and store.steps() == [1, 2]


def test_a_checkpoint_of_another_model_is_an_error_that_names_arrays(tmp_path, state):
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1)) as store:
        store.save(1, state, {})
    wider = make_state(width=48)
    with pytest.raises(DataError) as caught:
        store.restore(1, abstract(wider))
    assert "`params.decoder.w` is float32[32, 64] there, float32[48, 64] here" in caught.value.message
    with pytest.raises(DataError, match="`step` is int32.. there, float32.. here"):
        store.restore(1, abstract(state.replace(step=jnp.float32(0))))
    with pytest.raises(DataError, match="it lacks `params.extra`"):
        store.restore(1, abstract(state.replace(params={**state.params, "extra": jnp.zeros(3)})))
    with pytest.raises(DataError, match="only it has `key`"):
        store.restore(1, abstract(state.replace(key=None)))
    with pytest.raises(DataError, match="no checkpoint of step 5") as caught:
        store.restore(5, abstract(state))
    assert "Other checkpoints: 1." in caught.value.hint


def test_a_checkpoint_restores_on_any_mesh_bit_for_bit(tmp_path):
    sums = []
    for devices, verb, shape in (
        (8, "save", "{'fsdp': 4, 'tensor': 2}"),
        (1, "restore", "{}"),
        (8, "restore", "{'data': 8}"),
        (8, "restore", "{'tensor': 4, 'data': 2}"),
    ):
        env = os.environ | cpu_devices(devices)
        command = [sys.executable, str(ON_MESHES), verb, str(tmp_path / "checkpoints"), shape]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        sums.append(done.stdout)
    assert sums[0] and len(set(sums)) == 1
