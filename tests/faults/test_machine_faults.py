"""A full disk, a lack of permission, and losses that are not finite, in real runs."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tests.faults.processes import Process, assert_same_run, last_step, train, wait_until
from tests.training.runs import small


def _mount(directory: pathlib.Path, size: int) -> None:
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", directory]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("free", [0, 4, 16, 300, 700], ids=lambda kib: f"{kib}-KiB")
def test_a_disk_that_fills_up_at_five_places(straight, tmp_path, counts, free):
    """At the start, in the files of the start, in the metrics, in the first checkpoint and in a later one."""
    _mount(tmp_path / "run", 20_000)
    filler = tmp_path / "run" / "filler"
    try:
        stat = os.statvfs(tmp_path / "run")
        filler.write_bytes(bytes(stat.f_bavail * stat.f_bsize - free * 1024))
        with train(tmp_path) as process:
            code, report = process.end()
        assert code == 3, report
        # The thread that writes TensorBoard's events prints a traceback of its own.
        (error,) = [line for line in report.splitlines() if line.startswith("error: ")]
        assert "no space left" in error.lower() and "bug" not in report, report
        stopped = last_step(tmp_path / "run")
        filler.unlink()
        with train(tmp_path) as process:
            code, report = process.end()
        assert code == 0, report
        assert_same_run(tmp_path / "run", straight)
        counts.add("full disk", f"exit code 3 at step {stopped}, then resumed, run equal")
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


@pytest.mark.slow
@pytest.mark.faults
def test_a_file_system_that_becomes_read_only(straight, tmp_path, counts):
    _mount(tmp_path / "run", 20_000)
    try:
        with train(tmp_path) as process:
            wait_until(lambda: (tmp_path / "run" / "checkpoints" / "20").exists(), process)
            # The kernel refuses to remount while files are open for writing, so that the limit falls to nothing.
            subprocess.run(["mount", "-o", "remount,size=1k", tmp_path / "run"], check=False, capture_output=True)
            process.end()
        subprocess.run(["mount", "-o", "remount,size=20m,ro", tmp_path / "run"], check=True)
        with train(tmp_path) as process:
            code, report = process.end()
        assert code in (0, 3) and "Traceback" not in report and "bug" not in report, report
        with Process(tmp_path, "eval", "run") as process:
            code, report = process.end()
        assert code == 0 and "log_pplx" in report, report
        subprocess.run(["mount", "-o", "remount,rw", tmp_path / "run"], check=True)
        with train(tmp_path) as process:
            code, report = process.end()
        assert code == 0, report
        assert_same_run(tmp_path / "run", straight)
        counts.add("file system that fills up and becomes read-only", "stopped, evaluated, resumed, run equal")
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is missing")
@pytest.mark.parametrize("place", [".", "checkpoints", "metrics.jsonl", "config.txt"])
def test_a_lack_of_permission(straight, tmp_path, counts, place):
    """As a user to whom permissions apply: root's right to pass over them is dropped."""
    shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "60")
    path = tmp_path / "run" / place
    mode = path.stat().st_mode
    path.chmod(0)
    limited = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    with train(tmp_path, prefix=limited) as process:
        code, report = process.end()
    assert code == 3 and "ermission denied" in report, report
    assert "Traceback" not in report and "bug" not in report, report
    path.chmod(mode)
    with train(tmp_path) as process:
        code, report = process.end()
    assert code == 0, report
    assert_same_run(tmp_path / "run", straight)
    counts.add("file or directory without permission", "exit code 3, then resumed, run equal")


@pytest.mark.slow
@pytest.mark.faults
def test_nan_for_ever_keeps_the_last_sound_checkpoint(tmp_path, counts):
    """Every restart diverges again, and none saves what is not finite."""
    with train(tmp_path, num_train_steps=10) as process:
        assert process.end()[0] == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    for _ in range(2):
        with train(tmp_path, "--allow-changed", learning_rate=1e40, save_interval_steps=1) as process:
            code, report = process.end()
        assert code == 6 and "Traceback" not in report, report
        assert sorted(path.name for path in checkpoints.iterdir()) == before
        counts.add("loss of NaN for ever", "exit code 6, checkpoints unchanged")
    with train(tmp_path, "--allow-changed") as process:
        assert process.end()[0] == 0


@pytest.mark.slow
@pytest.mark.faults
def test_nan_at_one_step_is_skipped_where_the_recipe_allows_it(tmp_path, counts):
    recipe = tmp_path / "nan.py"
    recipe.write_text('''
import dataclasses

import numpy as np

from pax_recipes.tiny import tiny_synthetic
from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput


@dataclasses.dataclass
class OneBadBatch(SyntheticInput):
    def get_next(self):
        batch = super().get_next()
        self.served = getattr(self, "served", 0) + 1
        if self.served == 13:
            batch["weights"] = np.full_like(batch["weights"], np.nan)
        return batch


@recipe()
def nan():
    """One batch of NaN."""
    config = tiny_synthetic()
    config.train_input = OneBadBatch.config()
    return config
''')
    for skips, expected in ((True, 0), (False, 6)):
        run = f"--run-dir=run-{expected}"
        options = [*small(eval_interval_steps=None), f"--set=skip_invalid_gradients={str(skips).lower()}"]
        with Process(tmp_path, "train", "./nan.py:nan", *options, run) as process:
            code, report = process.end()
        assert code == expected and "Traceback" not in report, report
        counts.add("loss of NaN at one step", "skipped" if skips else "exit code 6")
