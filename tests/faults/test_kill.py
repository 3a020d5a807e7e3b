"""SIGKILL while files of a run are written: the run resumes, and ends like one that nobody killed, bit for bit."""

from __future__ import annotations

import contextlib
import pathlib
import random
import signal
import subprocess
import time

import pytest

from tests.faults.processes import Process, assert_same_run, killed_at, train, wait_until

# Operations on each file: open, fsync, before the rename, after it. `metrics.jsonl` is opened, and then appended to.
OPERATIONS = {"recipe.yaml": 4, "config.txt": 4, "environment.json": 4, "metrics.jsonl": 1}


def _finish(folder, straight) -> None:
    with train(folder) as process:
        code, report = process.end()
    assert code == 0, report
    assert_same_run(folder / "run", straight)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("file", OPERATIONS)
def test_kills_at_each_operation_on_a_file_of_the_start(straight, tmp_path, counts, scale, file):
    for number in range(scale(5)):
        with train(tmp_path, env=killed_at(file, number % OPERATIONS[file] + 1)) as process:
            assert process.end()[0] == -signal.SIGKILL
        counts.add(f"SIGKILL at a write of {file}", "resumed, run equal")
    _finish(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.faults
def test_kills_at_operations_of_a_save(straight, tmp_path, counts, scale):
    moments = random.Random(0)
    for number in range(scale(10)):
        with train(tmp_path, env=killed_at("orbax-checkpoint-tmp", moments.randint(1, 70))) as process:
            code, report = process.end()
            assert code == -signal.SIGKILL, (number, report)
        counts.add("SIGKILL at a file operation of a save", "resumed, run equal")
        if number % 4 == 3:
            _finish(tmp_path, straight)
            tmp_path = tmp_path / str(number)
            tmp_path.mkdir()
    _finish(tmp_path, straight)


def _wait_for_save(checkpoints: pathlib.Path, process: Process) -> None:
    """Waits until a save begins; what an earlier one left does not count."""
    seen = set(checkpoints.glob("*"))
    wait_until(lambda: set(checkpoints.glob("*tmp*")) - seen, process)


@pytest.mark.slow
@pytest.mark.faults
def test_kills_at_any_time_of_a_save(straight, tmp_path, counts, scale):
    moments = random.Random(1)
    for number in range(scale(10)):
        with train(tmp_path) as process:
            _wait_for_save(tmp_path / "run" / "checkpoints", process)
            time.sleep(moments.uniform(0, 0.05))
            process.process.kill()
            assert process.end()[0] == -signal.SIGKILL
        counts.add("SIGKILL during a save", "resumed, run equal")
        if number % 4 == 3:
            _finish(tmp_path, straight)
            tmp_path = tmp_path / str(number)
            tmp_path.mkdir()
    _finish(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.faults
def test_kills_at_any_time(straight, tmp_path, counts, scale):
    """A kill that comes too late does not count: the next ones come earlier, to a new run."""
    moments, latest, killed = random.Random(2), 8.0, 0
    while killed < scale(10):
        moment = moments.uniform(0, latest)
        with train(tmp_path) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(moment)
            process.process.kill()
            code, report = process.end()
        if code == -signal.SIGKILL:
            killed += 1
            counts.add("SIGKILL at any time", "resumed, run equal")
            continue
        assert code == 0, report
        assert_same_run(tmp_path / "run", straight)
        latest = 0.8 * moment
        tmp_path = tmp_path / "next"
        tmp_path.mkdir()
    _finish(tmp_path, straight)
