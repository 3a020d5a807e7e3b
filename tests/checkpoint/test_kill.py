"""SIGKILL and a full disk: committed checkpoints survive, and no others are listed."""

from __future__ import annotations

import gc
import pathlib
import random
import subprocess
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.convert.maxtext.checkpoint_files import write_maxtext
from paxcli.errors import MissingError
from tests.checkpoint.states import abstract, assert_same_bits, make_state

SAVES = pathlib.Path(__file__).with_name("saves_until_killed.py")


def test_a_kill_at_any_time_leaves_only_complete_checkpoints(tmp_path):
    directory = tmp_path / "checkpoints"
    rows = {"rows": [jax.ShapeDtypeStruct((1_000_000,), np.float32)] * 5}
    moments, newest = random.Random(0), 0
    for _ in range(5):
        command = [sys.executable, str(SAVES), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.8))
            process.kill()
        store = CheckpointStore(directory)
        steps = store.steps()
        assert not steps or steps[-1] >= newest
        for step in steps:
            restored, input_state = store.restore(step, rows)
            assert zlib.crc32(np.stack(restored["rows"])) == input_state["crc"]
        newest = steps[-1] if steps else newest
    assert newest > 1
    with CheckpointStore(directory, Checkpoint(save_interval_steps=1)) as store:
        store.save(newest + 100, {"a": jnp.zeros(3)}, {})
    assert sorted(path.name for path in directory.iterdir()) == sorted(map(str, store.steps()))


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a file system of 12 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", directory], capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)  # a write in the background may still end


def test_a_full_disk_is_named_and_older_checkpoints_survive(small_disk, caplog):
    state = {"small": make_state(), "w": jnp.asarray(np.random.default_rng(0).random(1_000_000, np.float32))}
    with pytest.raises(MissingError, match="no space left") as caught:
        with CheckpointStore(small_disk / "checkpoints", Checkpoint(save_interval_steps=1)) as store:
            for step in range(1, 9):
                store.save(step, state, {})
    assert str(small_disk) in caught.value.message and "1, 2" in caught.value.hint
    assert 2 <= len(store.steps()) < 4
    for step in store.steps():
        assert_same_bits(store.restore(step, abstract(state))[0], state)
    gc.collect()
    assert not caplog.records  # Orbax's other failed writes would each log a stack trace


def test_a_background_error_is_raised_before_the_next_save(small_disk):
    state = {"w": jnp.asarray(np.random.default_rng(0).random(5_000_000, np.float32))}
    store = CheckpointStore(small_disk / "checkpoints", Checkpoint(save_interval_steps=1000))
    store.save(1, state, {}, force=True)
    with pytest.raises(MissingError, match="no space left"):
        for step in range(2, 900):
            store.should_save(step)
            time.sleep(0.02)
    assert store.steps() == []
    store.close()


def test_a_full_disk_of_local_checkpoints_is_named(small_disk, tmp_path):
    local = {"local_directory": str(small_disk), "local_save_interval_steps": 1}
    state = {"w": np.random.default_rng(0).random(4_000_000, np.float32)}
    with pytest.raises(MissingError, match=f"{small_disk}.*no space left"):
        with CheckpointStore(tmp_path / "checkpoints", Checkpoint(save_interval_steps=5, **local)) as store:
            store.save(1, state, {})


def test_a_full_disk_is_named_in_an_export_to_maxtext(small_disk, caplog):
    random = np.random.default_rng(0)
    state = {"params": {f"w{number}": random.random(1_000_000, np.float32) for number in range(8)}}
    with pytest.raises(MissingError, match="no space left on the device"):
        write_maxtext(small_disk / "maxtext", 2, state)
    gc.collect()
    assert not caplog.records
