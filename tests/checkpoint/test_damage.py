"""A damaged checkpoint raises an error that lists the other steps; it is never restored with wrong values."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.manifest import _checksum
from paxcli.checkpoint.policy import Checkpoint
from paxcli.errors import DataError, MissingError, PaxError, RemoteError, Stopped
from tests.checkpoint.states import abstract, assert_same_bits, make_state


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    with CheckpointStore(directory, Checkpoint(save_interval_steps=1)) as store:
        for step in (1, 2, 3):
            store.save(step, make_state(step), {"position": step})
    return directory


def data_files(step_dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted((f for f in step_dir.rglob("*") if f.is_file()), key=lambda f: (-f.stat().st_size, str(f)))


def damage(file: pathlib.Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "truncate":
        os.truncate(file, len(content) // 2)
    elif kind == "empty":
        os.truncate(file, 0)
    elif kind == "zeros":
        file.write_bytes(bytes(len(content)))
    else:
        bits = np.random.default_rng(int(kind.split()[-1]))
        for position in bits.integers(len(content), size=1 if kind.startswith("one bit") else 64):
            content[position] ^= 1 << int(bits.integers(8))
        file.write_bytes(content)


def outcome(directory: pathlib.Path) -> str:
    """`right` or `refused`; fails if the restored state is wrong."""
    store, expected = CheckpointStore(directory), make_state(3)
    if store.latest_step() != 3:
        return "refused"
    try:
        restored, input_state = store.restore(3, abstract(expected))
    except PaxError as error:
        assert isinstance(error, DataError)
        assert "step 3" in error.message and "1, 2" in error.hint
        return "refused"
    assert_same_bits(restored, expected)
    assert input_state == {"position": 3}
    return "right"


def restore_previous(directory: pathlib.Path) -> tuple[int, list[str]]:
    """The step that `on_corrupt="previous"` restores, after a check of its values, and what it announced."""
    announced: list[str] = []
    store = CheckpointStore(directory, Checkpoint(on_corrupt="previous"))
    step, restored, input_state = store.restore_newest(abstract(make_state()), announced.append)
    assert_same_bits(restored, make_state(step))
    assert input_state == {"position": step}
    return step, announced


SURE = ["delete", "truncate", "empty", "zeros", "64 bits, seed 0", "64 bits, seed 1"]


@pytest.mark.parametrize("kind", [*SURE, *(f"one bit, seed {seed}" for seed in range(6))])
def test_damage_of_any_file_is_detected(checkpoints, tmp_path, kind):
    names = [file.relative_to(checkpoints / "3") for file in data_files(checkpoints / "3")]
    results = []
    for number, name in enumerate(names if kind == "delete" else names[:3]):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoints, copy)
        damage(copy / "3" / name, kind)
        results.append(outcome(copy))  # `right` if the damaged bytes are never read
    assert "refused" in results or kind not in SURE


def test_a_failed_restore_leaves_no_read_behind(tmp_path, monkeypatch, caplog):
    """Orbax closes the event loop of a failed restore: each read that ended later printed a stack trace."""
    state = {f"w{number}": jnp.full((64 + number, 64), number, jnp.float32) for number in range(64)}
    with CheckpointStore(tmp_path, Checkpoint(save_interval_steps=1)) as store:
        store.save(3, state, {})
    for file in data_files(tmp_path / "3" / "state"):
        if file.parent.name == "d":
            os.truncate(file, 100)
    unraisable: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(str(found.exc_value)))
    for _ in range(3):
        with pytest.raises(DataError, match="step 3"):
            CheckpointStore(tmp_path).restore(3, abstract(state))
    gc.collect()
    assert not unraisable and not caplog.records


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("arrays", None),
        ("arrays", {"params.w": {"shape": [1]}}),
        ("input_states", []),
        ("input_states", [3]),
        ("step", "x"),
    ],
)
def test_a_forged_manifest_is_detected(checkpoints, tmp_path, part, value):
    """Its checksum is right, and its content is not."""
    shutil.copytree(checkpoints, tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*/manifest/metadata"):
        content = json.loads(file.read_text())["content"] | {part: value}
        file.write_text(json.dumps({"checksum": _checksum(content), "content": content}))
    with pytest.raises(DataError, match="manifest is damaged"):
        CheckpointStore(tmp_path / "copy").restore(3, abstract(make_state()))


def test_a_copy_under_the_number_of_another_step_is_refused(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    shutil.copytree(checkpoints / "2", tmp_path / "checkpoints" / "7")
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(DataError, match="step 7 .*unusable: it is a copy of the checkpoint of step 2"):
        store.restore(7, abstract(make_state(2)))


def test_previous_skips_damaged_ones_says_why_and_keeps_them(checkpoints, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    assert restore_previous(copy) == (3, [])
    damage(copy / "3" / "manifest" / "metadata", "zeros")
    damage(data_files(copy / "2")[0], "64 bits, seed 0")
    with pytest.raises(DataError, match="step 3 .* manifest"):
        CheckpointStore(copy, Checkpoint()).restore_newest(abstract(make_state()), print)
    step, announced = restore_previous(copy)
    assert step == 1 and CheckpointStore(copy).steps() == [1]
    assert "step 3" in announced[0] and "manifest" in announced[0] and "3.damaged" in announced[0]
    assert "step 2" in announced[1] and "2.damaged" in announced[1]
    assert (copy / "3.damaged" / "manifest" / "metadata").exists() and (copy / "2.damaged" / "state").exists()

    # The run goes on, and what it saves under the same step is not taken for the damaged one.
    with CheckpointStore(copy, Checkpoint(save_interval_steps=1)) as store:
        assert store.save(2, make_state(2), {"position": 2})
    assert restore_previous(copy) == (2, [])
    damage(data_files(copy / "2")[0], "64 bits, seed 0")
    assert restore_previous(copy)[0] == 1 and (copy / "2.damaged+").exists()

    damage(data_files(copy / "1")[0], "64 bits, seed 0")
    with pytest.raises(DataError, match="step 1"):
        restore_previous(copy)
    assert CheckpointStore(copy).steps() == [1]  # the last one keeps its name


def test_a_process_that_was_slower_to_find_the_damage_asks_for_a_restart(checkpoints, tmp_path, monkeypatch):
    """It ended with the exit code of unusable data, after which a scheduler does not start the job again."""
    copy, announced, restore = tmp_path / "copy", [], CheckpointStore.restore
    shutil.copytree(checkpoints, copy)

    def restore_later(self, step, state):
        (copy / str(step)).rename(copy / f"{step}.damaged")  # as the process did that was faster
        return restore(self, step, state)

    def stop(error):
        raise error

    monkeypatch.setattr(CheckpointStore, "restore", restore_later)
    monkeypatch.setattr("paxcli.checkpoint.manager.exit_now", stop)
    monkeypatch.setattr("paxcli.checkpoint.manager.jax.process_count", lambda: 2)
    with pytest.raises(Stopped):
        CheckpointStore(copy, Checkpoint(on_corrupt="previous")).restore_newest(
            abstract(make_state()), announced.append
        )
    assert "It is now 3.damaged," in announced[0]


def test_a_lack_of_permission_is_not_damage(checkpoints, tmp_path, monkeypatch):
    shutil.copytree(checkpoints, tmp_path / "copy")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    store = CheckpointStore(tmp_path / "copy", Checkpoint(on_corrupt="previous"))
    monkeypatch.setattr(type(store.directory), "read_text", refuse)
    with pytest.raises(MissingError, match="permission denied"):
        store.restore_newest(abstract(make_state()), print)
    assert store.steps() == [1, 2, 3]


def test_the_input_state_is_protected_too(checkpoints, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    file = copy / "3" / "manifest" / "metadata"
    text = file.read_text()
    assert '"position": 3' in text
    file.write_text(text.replace('"position": 3', '"position": 2'))
    with pytest.raises(DataError, match="step 3 .* manifest is damaged"):
        CheckpointStore(copy).restore(3, abstract(make_state()))
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match="step 3 .* manifest cannot be read"):
        CheckpointStore(copy).restore(3, abstract(make_state()))


@pytest.mark.parametrize("reason", ["UNAVAILABLE: all retries failed", "HttpError: 503", "Connection reset by peer"])
def test_a_bucket_that_does_not_answer_is_no_damage(reason: str) -> None:
    """Else `on_corrupt="previous"` would rename a sound checkpoint."""
    store = CheckpointStore("gs://bucket/run/checkpoints")
    with pytest.raises(RemoteError, match="Cannot read the checkpoint of step 3"), store._translate_read_errors(3):
        raise DataError(f"its arrays cannot be read: {reason}")


def test_a_timeout_because_of_a_changed_clock_names_it(tmp_path, monkeypatch) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", Checkpoint())
    now, timeout = time.time(), "ChainedFuture completed 0/1 futures but timed out after 94608000 seconds."
    monkeypatch.setattr(time, "time", lambda: now + 94_608_000)
    with pytest.raises(Stopped, match=r"clock of this machine changed by 94,608,\d\d\d s"):
        with store._translate_write_errors():
            raise TimeoutError(timeout)
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(DataError, match="timed out"), store._translate_write_errors():
        raise TimeoutError(timeout)
