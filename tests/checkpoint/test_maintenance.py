"""Checkpoints are listed, verified, deleted and copied; damage is found, and the last one is never deleted."""

from __future__ import annotations

import json
import pathlib
import pwd
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from paxcli.checkpoint import maintenance
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.reading import named_leaves
from paxcli.cli.checkpoints import app
from paxcli.cli.output import run
from paxcli.config.load import is_run_dir
from paxcli.errors import ConfigError, DataError
from paxcli.training.run_dir import RunDir
from tests.checkpoint.states import abstract, assert_same_bits, make_state

STEPS = (1, 2, 3)
_COPY_UNTIL_KILLED = """
import os, signal, sys
from paxcli.checkpoint import maintenance

run_dir, out, files = sys.argv[1:]
copy_file, copied = maintenance.copy_file, []

def copy_or_die(*paths):
    if len(copied) == int(files):
        os.kill(os.getpid(), signal.SIGKILL)
    copied.append(paths)
    copy_file(*paths)

maintenance.copy_file = copy_or_die
maintenance.copy_checkpoints(run_dir, out, [1, 3])
"""


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run"
    with CheckpointStore(path / "checkpoints", Checkpoint(save_interval_steps=1)) as store:
        for step in STEPS:
            store.save(step, make_state(step), {"position": step})
    (path / "recipe.yaml").write_text("recipe: tiny\n")
    return path


def steps_of(run_dir: pathlib.Path) -> list[int]:
    return CheckpointStore(run_dir / "checkpoints").steps()


def flip_a_byte(step_dir: pathlib.Path) -> None:
    """In the middle of the largest file, which holds arrays."""
    file = max((path for path in step_dir.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def command(*arguments: str) -> int:
    return run(app, arguments)


@pytest.mark.parametrize("has_owner", [True, False])
def test_sizes_and_times_are_those_of_the_files(
    run_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, has_owner: bool
) -> None:
    if not has_owner:  # their user's id has no name, as in a container
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    found = maintenance.list_checkpoints(str(run_dir))
    assert [info.step for info in found] == [*STEPS]
    for info in found:
        stats = [path.stat() for path in pathlib.Path(info.path).rglob("*") if path.is_file()]
        assert info.bytes == sum(stat.st_size for stat in stats)
        assert info.saved_at == pytest.approx(max(stat.st_mtime for stat in stats), abs=1)


def test_a_sound_checkpoint_is_read_completely(run_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_CHUNK_BYTES", 1000)  # less than one array
    arrays = {name: x.nbytes for name, x in named_leaves(make_state(1)).items()}
    for result, step in zip(maintenance.verify_checkpoints(str(run_dir)), STEPS, strict=True):
        assert result == maintenance.Verified(step, len(arrays), sum(arrays.values()), None)


def test_one_changed_bit_is_found(run_dir: pathlib.Path) -> None:
    flip_a_byte(run_dir / "checkpoints" / "2")
    problems = {result.step: result.problem for result in maintenance.verify_checkpoints(str(run_dir))}
    assert problems[1] is None and problems[3] is None
    assert problems[2]


def test_verify_exits_with_5_and_names_the_intact_ones(run_dir: pathlib.Path, capsys) -> None:
    assert command("verify", str(run_dir), "--json") == 0
    assert [one["problem"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [None] * 3
    flip_a_byte(run_dir / "checkpoints" / "2")
    assert command("verify", str(run_dir), "--json") == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert "1 of 3" in error["message"] and "Intact: 1, 3" in error["hint"] and "--step 2" in error["hint"]


def test_deleted_ones_are_gone_and_the_last_one_stays(run_dir: pathlib.Path) -> None:
    files = {*run_dir.iterdir()}
    assert command("rm", str(run_dir), "--step", "1", "--dry-run") == 0
    assert {*run_dir.iterdir()} == files
    assert steps_of(run_dir) == [1, 2, 3]
    assert command("rm", str(run_dir), "--step", "1", "--step", "2") == 0
    assert steps_of(run_dir) == [3]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["3"]
    with pytest.raises(ConfigError, match="every checkpoint"):
        maintenance.delete_checkpoints(str(run_dir), [3])
    assert steps_of(run_dir) == [3]


def test_nothing_is_deleted_under_a_training_process(run_dir: pathlib.Path) -> None:
    with RunDir(run_dir).lock():
        assert command("rm", str(run_dir), "--step", "1") == 2
        assert steps_of(run_dir) == [1, 2, 3]
    assert command("rm", str(run_dir), "--step", "1") == 0


def test_a_copy_restores_the_same_bits(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert command("copy", str(run_dir), "--out", str(tmp_path / "dry"), "--dry-run") == 0
    assert not (tmp_path / "dry").exists()
    beside = (
        "tokenizers.json",
        "tokenizers/0a1b/tokenizer.json",
        "huggingface/config.json",
        "huggingface/more/tool_use.jinja",
    )
    for name in beside:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)
    copied = maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"), [1, 3])
    assert [(tmp_path / "copy" / name).read_text() for name in beside] == list(beside)
    assert [info.step for info in copied] == [1, 3] == steps_of(tmp_path / "copy")
    assert (tmp_path / "copy" / "recipe.yaml").read_text() == "recipe: tiny\n"
    restored, input_state = CheckpointStore(tmp_path / "copy" / "checkpoints").restore(3, abstract(make_state(3)))
    assert_same_bits(restored, make_state(3))
    assert input_state == {"position": 3}
    assert [info.step for info in maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "newest"))] == [3]
    assert [info.step for info in maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"), [1])] == [1]
    with CheckpointStore(tmp_path / "other" / "checkpoints", Checkpoint(save_interval_steps=1)) as store:
        store.save(1, make_state(2), {"position": 1})
    with pytest.raises(ConfigError, match="already has other checkpoints of steps 1"):
        maintenance.copy_checkpoints(str(tmp_path / "other"), str(tmp_path / "copy"), [1])
    (tmp_path / "copy" / "recipe.yaml").write_text("recipe: tiny-synthetic\n")
    with pytest.raises(ConfigError, match="copy is another run: its recipe.yaml differs"):
        maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"), [2], dry_run=True)


def test_a_later_step_is_copied_beside_an_earlier_one(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run that was resumed in between has another command in `environment.json`; it was taken for another run."""
    for step, command_line in ((1, '["pax", "train", "tiny"]'), (2, '["pax", "train", "run"]')):
        (run_dir / "environment.json").write_text(command_line)
        maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"), [step])
        assert (tmp_path / "copy" / "environment.json").read_text() == command_line
    assert steps_of(tmp_path / "copy") == [1, 2]


def test_a_moved_run_whose_path_has_wildcards_is_copied_completely(
    run_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "runs [1]").mkdir()
    moved = run_dir.rename(tmp_path / "runs [1]" / "run")
    maintenance.copy_checkpoints(str(moved), str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "recipe.yaml").read_text() == "recipe: tiny\n"
    assert steps_of(tmp_path / "copy") == [3]


def test_a_copy_that_found_the_disk_full_can_be_repeated(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))  # no file may be larger
    try:
        with pytest.raises(OSError, match="File too large"):
            maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "recipe.yaml").read_text() == "recipe: tiny\n"


def test_an_interrupted_copy_is_not_a_checkpoint(
    run_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_file, copied = shutil.copyfileobj, []

    def fails_at_the_fourth(*args):
        copied.append(args)
        if len(copied) == 4:
            raise OSError("no space left on device")
        copy_file(*args)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", fails_at_the_fourth)
        with pytest.raises(OSError, match="no space"):
            maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"))
    assert steps_of(tmp_path / "copy") == []
    maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"))
    assert steps_of(tmp_path / "copy") == [3]
    assert next(maintenance.verify_checkpoints(str(tmp_path / "copy"))).problem is None


def test_a_killed_copy_is_not_a_run_until_it_is_repeated(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Killed before every fifth file. A run with a recipe and without a checkpoint would start at step 0."""
    (run_dir / "config.txt").write_text("task.name = null\n")
    (run_dir / "recipe-1.yaml").write_text("recipe: tiny\n")
    (run_dir / "recipe.yaml").write_text("recipe: recipe-1.yaml\n")
    killed = 0
    while True:
        copy, code = tmp_path / f"copy {killed}", _COPY_UNTIL_KILLED
        done = subprocess.run([sys.executable, "-c", code, str(run_dir), str(copy), str(killed)])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        assert not (copy / "recipe.yaml").exists() and not is_run_dir(str(copy))
        if killed % 3 == 0:  # otherwise the test takes long
            maintenance.copy_checkpoints(str(run_dir), str(copy), [1, 3])
            assert steps_of(copy) == [1, 3] and is_run_dir(str(copy))
            assert not [found.problem for found in maintenance.verify_checkpoints(str(copy)) if found.problem]
            assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "3"]
        killed += 5
    assert killed > 10 and steps_of(copy) == [1, 3]


def test_a_killed_copy_of_another_run_is_not_continued(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (run_dir / "config.txt").write_text("task.name = null\n")
    arguments = [str(run_dir), str(tmp_path / "copy"), "8"]
    assert subprocess.run([sys.executable, "-c", _COPY_UNTIL_KILLED, *arguments]).returncode == -signal.SIGKILL
    (run_dir / "config.txt").write_text('task.name = "other"\n')
    with pytest.raises(ConfigError, match="copy is another run: its config.txt differs"):
        maintenance.copy_checkpoints(str(run_dir), str(tmp_path / "copy"), [2])


def test_a_checkpoint_that_training_deletes_meanwhile_is_neither_damage_nor_a_bug(
    run_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    listed, verify = maintenance.files_in, maintenance._verify
    with monkeypatch.context() as patched:
        patched.setattr(maintenance, "files_in", lambda path: [*listed(path), *[path / "gone"][: path.is_dir()]])
        assert command("ls", str(run_dir)) == command("copy", str(run_dir), "--out", str(tmp_path / "copy")) == 5
    assert capsys.readouterr().err.count("was deleted while it was read") == 2

    def verify_slowly(path: pathlib.Path):
        if path.name == "1":
            shutil.rmtree(path)
        return verify(path)

    monkeypatch.setattr(maintenance, "_verify", verify_slowly)
    assert [found.step for found in maintenance.verify_checkpoints(str(run_dir))] == [2, 3]


@pytest.mark.parametrize("steps", [[7], [1, 7]])
def test_an_unknown_step_names_those_that_there_are(run_dir: pathlib.Path, steps: list[int]) -> None:
    for action in (
        maintenance.delete_checkpoints,
        lambda path, steps: next(maintenance.verify_checkpoints(path, steps)),
    ):
        with pytest.raises(DataError, match="step 7") as error:
            action(str(run_dir), steps)
        assert "1, 2, 3" in error.value.hint


def test_a_directory_without_checkpoints_is_refused(tmp_path: pathlib.Path) -> None:
    for verb in (["ls"], ["verify"], ["rm", "--step", "1"], ["copy", "--out", str(tmp_path / "out")]):
        assert command(verb[0], str(tmp_path), *verb[1:]) == 5


def test_the_rest_of_an_interrupted_deletion_is_deleted(run_dir: pathlib.Path) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "deleted").mkdir()
    (checkpoints / "1").rename(checkpoints / "deleted" / "1")  # killed after the rename
    assert steps_of(run_dir) == [2, 3]
    maintenance.delete_checkpoints(str(run_dir), [2])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["3"]
