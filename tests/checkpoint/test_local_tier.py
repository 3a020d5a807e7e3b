"""The local tier of checkpoints: which tier a run resumes from, and when local checkpoints do not count."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import pytest
from etils import epath

from paxcli.checkpoint.local_tier import find_local, local_steps
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.errors import ConfigError, DataError
from tests.checkpoint.states import abstract, assert_same_bits, make_state
from tests.checkpoint.test_damage import damage


def _store(folder: pathlib.Path, run: str = "run") -> CheckpointStore:
    local = {"local_directory": str(folder / "local [1]"), "local_save_interval_steps": 2}
    return CheckpointStore(folder / run / "checkpoints", Checkpoint(save_interval_steps=5, **local))


def _steps_here(checkpoints: pathlib.Path) -> list[int]:
    return local_steps(epath.Path(checkpoints), str(checkpoints.parents[1] / "local [1]"))


def _save(folder: pathlib.Path, steps: range) -> None:
    """As a process that is killed after the last step: nothing is closed."""
    store = _store(folder)
    for step in steps:
        store.save(step, make_state(step), {"position": step}, recipe={"seed": step})
    store.wait()
    assert store._local is not None
    store._local.wait()


def _restore(folder: pathlib.Path, run: str = "run") -> tuple[int, list[str]]:
    announced: list[str] = []
    store = _store(folder, run)
    newest = store.latest_step()
    step, state, positions = store.restore_newest(abstract(make_state()), announced.append)
    assert_same_bits(state, make_state(step))
    assert positions == {"position": step} and store.recipe(step) == {"seed": step}
    assert newest == step or announced
    return step, announced


def test_the_newest_of_both_tiers_is_restored(tmp_path):
    _save(tmp_path, range(1, 5))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert CheckpointStore(checkpoints).steps() == []  # two local checkpoints only
    assert [path.name for path in find_local(checkpoints)] == ["2", "4"] and _steps_here(checkpoints) == [2, 4]
    assert (
        local_steps(checkpoints, None) == local_steps(checkpoints, str(tmp_path)) == []
    )  # the recipe has no such tier
    assert _restore(tmp_path) == (4, [])
    _save(tmp_path, range(5, 10))
    assert CheckpointStore(checkpoints).steps() == [5]
    assert [path.name for path in find_local(checkpoints)] == ["6", "8"]
    assert _restore(tmp_path) == (8, [])

    copied = tmp_path / "copy"  # continues from its own checkpoint, not from the steps of another run
    shutil.copytree(tmp_path / "run", copied)
    assert _steps_here(copied / "checkpoints") == [] and _restore(tmp_path, "copy") == (5, [])

    with _store(tmp_path) as store:
        store.save(10, make_state(10), {"position": 10}, recipe={"seed": 10})
    assert find_local(checkpoints) == []  # the run directory has what they had
    assert _restore(tmp_path) == (10, [])


@pytest.mark.parametrize("kind", ["delete", "truncate", "empty", "zeros", "64 bits, seed 0"])
@pytest.mark.parametrize("file", ["shards.npz", "manifest.json"])
def test_a_damaged_local_checkpoint_is_passed_over(tmp_path, kind, file):
    _save(tmp_path, range(1, 9))
    [folder] = (tmp_path / "local [1]").glob("*/process-0-of-1")
    damage(folder / "8" / file, kind)
    step, announced = _restore(tmp_path)
    assert step == 6 and "local checkpoint of step 8 cannot be used" in announced[0]
    damage(folder / "6" / file, kind)
    assert _restore(tmp_path)[0] == 5
    assert not folder.exists()  # a later run in the run directory's steps must not find them


def test_a_new_run_at_the_same_path_has_no_local_checkpoints(tmp_path):
    _save(tmp_path, range(1, 5))
    shutil.rmtree(tmp_path / "run")
    assert _store(tmp_path).latest_step() is None and not list((tmp_path / "local [1]").iterdir())


def test_a_run_that_moves_its_local_checkpoints_does_not_find_those_of_another_run(tmp_path):
    """It continued from step 8 of a run that had been deleted."""
    _save(tmp_path, range(1, 10))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "local [1]").rename(tmp_path / "old")
    _save(tmp_path, range(1, 7))
    (tmp_path / "local [1]").rename(tmp_path / "new")
    (tmp_path / "old").rename(tmp_path / "local [1]")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "local.txt").write_text(str(tmp_path / "new"))  # the recipe names another directory from here on
    assert [path.name for path in find_local(checkpoints)] == ["4", "6"]
    assert _restore(tmp_path) == (5, [])
    _save(tmp_path, range(6, 9))
    assert [path.name for path in find_local(checkpoints)] == ["6", "8"]
    assert _restore(tmp_path) == (8, [])


def test_a_run_that_lost_its_local_checkpoints_says_where_it_continues(tmp_path, caplog):
    _save(tmp_path, range(1, 5))
    shutil.rmtree(tmp_path / "local [1]")
    with caplog.at_level("WARNING", logger="pax"):
        assert _store(tmp_path).latest_step() is None
    assert "training continues at step 0" in caplog.text


def test_a_run_on_another_number_of_processes_says_where_it_continues(tmp_path, caplog):
    _save(tmp_path, range(1, 9))
    [folder] = (tmp_path / "local [1]").glob("*/process-0-of-1")
    folder.rename(folder.with_name("process-0-of-2"))
    with caplog.at_level("WARNING", logger="pax"):
        assert _restore(tmp_path) == (5, [])
    assert "training continues at step 5" in caplog.text


def test_local_checkpoints_that_a_run_did_not_continue_from_are_not_found_later(tmp_path):
    """The run turned its local tier off, and on again: it continued from later steps of the abandoned start."""
    _save(tmp_path, range(1, 9))
    checkpoints = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(checkpoints, Checkpoint())
    assert store.restore_newest(abstract(make_state()), print)[0] == 5
    assert find_local(checkpoints) == [] and _restore(tmp_path) == (5, [])


def test_steps_of_an_abandoned_start_do_not_displace_new_ones(tmp_path):
    """As on a machine that has later steps, when another one lost its disk and the run starts again."""
    _save(tmp_path, range(6, 10))
    _save(tmp_path, range(1, 3))
    assert [path.name for path in find_local(tmp_path / "run" / "checkpoints")] == ["2"]
    _save(tmp_path, range(3, 5))
    assert [path.name for path in find_local(tmp_path / "run" / "checkpoints")] == ["2", "4"]


def test_another_model_does_not_take_them(tmp_path):
    _save(tmp_path, range(1, 9))
    announced: list[str] = []
    wanted = jax.tree.map(lambda x: x, abstract(make_state(width=16)))
    with pytest.raises(Exception, match="step 5 does not match this model"):
        _store(tmp_path).restore_newest(wanted, announced.append)
    assert "saved on another mesh" in announced[0]


def test_local_checkpoints_alone_that_cannot_be_used_are_an_error_and_kept(tmp_path):
    """Of another mesh, or of another number of processes: a new run would overwrite the old one's metrics."""
    _save(tmp_path, range(1, 5))
    with pytest.raises(DataError, match="has no checkpoint, and the local ones cannot be used") as caught:
        _store(tmp_path).restore_newest(abstract(make_state(width=16)), print)
    assert "local.txt" in str(caught.value.hint)
    [folder] = (tmp_path / "local [1]").glob("*/process-0-of-1")
    folder.rename(folder.with_name("process-0-of-2"))
    with pytest.raises(DataError, match="with process count 2, and this job's is 1") as caught:
        _store(tmp_path)
    assert "local.txt" in str(caught.value.hint) and find_local(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b"])
def test_a_damaged_record_of_the_local_directory_is_named(tmp_path, content):
    (tmp_path / "local.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"local\.txt is damaged") as caught:
        find_local(epath.Path(tmp_path))
    assert "checkpoint.local_directory" in str(caught.value.hint)


def test_the_directory_and_the_interval_need_each_other():
    with pytest.raises(ConfigError, match="need each other"):
        Checkpoint(local_directory="/tmp/a").validate()
    Checkpoint(local_directory="/tmp/a", local_save_interval_steps=5).validate()


def test_local_checkpoints_stay_until_one_of_the_run_is_restored(tmp_path):
    """The newest checkpoint of the run is damaged, and older local ones are sound."""
    _save(tmp_path, range(1, 9))  # local: 6 and 8; the run's: 5
    shutil.copytree(tmp_path / "local [1]", tmp_path / "kept")
    with _store(tmp_path) as store:
        store.save(10, make_state(10), {"position": 10}, force=True, recipe={"seed": 10})
    shutil.rmtree(tmp_path / "local [1]", ignore_errors=True)
    shutil.copytree(tmp_path / "kept", tmp_path / "local [1]")
    damage(next((tmp_path / "run" / "checkpoints" / "10" / "manifest").iterdir()), "truncate")
    with pytest.raises(DataError, match="step 10"):
        _store(tmp_path).restore_newest(abstract(make_state()), print)
    policy = dataclasses.replace(_store(tmp_path)._policy, on_corrupt="previous")
    announced: list[str] = []
    store = CheckpointStore(tmp_path / "run" / "checkpoints", policy)
    step, state, positions = store.restore_newest(abstract(make_state()), announced.append)
    assert step == 8 and positions == {"position": 8} and "10.damaged" in announced[0]
    assert_same_bits(state, make_state(8))
