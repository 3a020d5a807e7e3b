"""Damaged checkpoints of real runs: none is restored wrong, and `--on-corrupt previous` resumes from an earlier one."""

from __future__ import annotations

import pathlib
import random
import shutil

import pytest

from paxcli.checkpoint.manager import CheckpointStore, DamagedCheckpoint
from paxcli.checkpoint.policy import Checkpoint
from paxcli.checkpoint.reading import read_manifest
from tests.checkpoint.test_damage import damage, data_files
from tests.faults.processes import assert_same_run, train

KINDS = ["delete", "truncate", "empty", "zeros", "64 bits, seed 0", "one bit, seed 1"]


def _until_50(straight: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A copy of the run as it was after step 50."""
    shutil.copytree(straight, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "60")
    return folder / "run"


def _arrays(checkpoints: pathlib.Path, step: int) -> dict:
    import jax

    manifest = read_manifest(CheckpointStore(checkpoints).directory / str(step))
    return {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in manifest.arrays.items()}


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_damages_are_detected_and_an_earlier_step_takes_over(straight, tmp_path, counts, scale, kind):
    """20 damages of each kind, to files of the newest checkpoint drawn at random."""
    names = [file.relative_to(straight / "checkpoints" / "50") for file in data_files(straight / "checkpoints" / "50")]
    wanted, choices = _arrays(straight / "checkpoints", 50), random.Random(kind)
    expected, position = CheckpointStore(straight / "checkpoints").restore(50, wanted)
    earlier, _ = CheckpointStore(straight / "checkpoints").restore(40, wanted)
    for number in range(scale(20)):
        run_dir = _until_50(straight, tmp_path / str(number))
        damage(run_dir / "checkpoints" / "50" / choices.choice(names), kind)
        store = CheckpointStore(run_dir / "checkpoints", Checkpoint())
        try:
            step, restored, found = store.restore_newest(wanted, print)
            outcome = "in a file that a restore does not read" if step == 50 else "its step no longer counts"
            assert step in (40, 50) and (step == 40 or found == position)
        except DamagedCheckpoint:
            outcome = "refused, then resumed from an earlier step"
            store = CheckpointStore(run_dir / "checkpoints", Checkpoint(on_corrupt="previous"))
            step, restored, _ = store.restore_newest(wanted, print)
            assert step == 40 and (run_dir / "checkpoints" / "50.damaged").exists()
        right = expected if step == 50 else earlier
        assert all(right[name].tobytes() == array.tobytes() for name, array in restored.items())
        counts.add("damaged file of a checkpoint", outcome)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_run_resumes_from_before_the_damage_and_ends_the_same(straight, tmp_path, counts, kind):
    run_dir = _until_50(straight, tmp_path)
    file = max((run_dir / "checkpoints" / "50" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    damage(file, kind)
    with train(tmp_path) as process:
        code, report = process.end()
    assert code == 5 and "step 50" in report and "--on-corrupt previous" in report
    with train(tmp_path, "--on-corrupt=previous") as process:
        code, report = process.end()
    assert code == 0 and "50.damaged" in report and "at step 40" in report
    assert_same_run(run_dir, straight)
    counts.add("damaged checkpoint of a run", "exit code 5, then resumed from an earlier step, run equal")
