"""The local tier: a job of two processes resumes from it, and from the run directory if one of them lost its part."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal

import pytest

from tests.faults.processes import Process, assert_same_run, killed_at, start_job
from tests.training.runs import small


def _train(folder: pathlib.Path, env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Exit codes and outputs of a job that saves every 5 steps locally, and every 40 in the run directory."""
    tiers = {"save_interval_steps": 40, "local_save_interval_steps": 5, "local_directory": str(folder / "local")}
    changes = small(global_batch_size=4, heartbeat_timeout_seconds=10, **tiers)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start_job(folder, changes, env=env)]
        return [job.end() for job in jobs]


@pytest.mark.slow
@pytest.mark.faults
def test_two_processes_of_which_one_loses_its_local_tier(tmp_path, counts):
    (tmp_path / "straight").mkdir()
    assert [code for code, _ in _train(tmp_path / "straight")] == [0, 0]
    run_dir = tmp_path / "run"

    # Process 1 dies at the start of its save of step 25; what process 0 has of that step is of no use.
    ends = _train(tmp_path, killed_at("process-1-of-2/25.tmp", 1))
    assert [code for code, _ in ends] == [75, -signal.SIGKILL], ends
    assert not list((run_dir / "checkpoints").glob("[0-9]*"))
    ends = _train(tmp_path, killed_at("process-1-of-2/55.tmp", 1))
    assert [code for code, _ in ends] == [75, -signal.SIGKILL], ends
    assert "at step 20." in ends[0][1], ends
    counts.add("SIGKILL between checkpoints of the local tier", "resumed from the local tier, run equal")

    with Process(tmp_path, "checkpoints", "ls", "run") as process:
        code, listed = process.end()
    assert code == 0 and "checkpoints/40" in listed and "process-0-of-2/50" in listed, listed
    [lost] = (tmp_path / "local").glob("*/process-1-of-2")
    shutil.rmtree(lost)
    ends = _train(tmp_path)
    assert [code for code, _ in ends] == [0, 0] and "at step 40." in ends[0][1], ends
    counts.add("local tier of one of two processes lost", "resumed from the run directory, run equal")
    assert_same_run(run_dir, tmp_path / "straight" / "run")
