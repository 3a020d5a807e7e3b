"""SIGINT and SIGTERM at any time, to every verb that takes long: the exit code tells what happened, within seconds."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.faults.processes import Process, assert_same_run, train, wait_until
from tests.training.runs import small

LIMIT = 30.0  # seconds from a signal to the end; a loaded machine takes longer than the 5 s of a quiet one

VERBS = {
    "train": ["train", "tiny", *small(eval_interval_steps=5), "--run-dir=run"],
    "eval": ["eval", "trained"],
    "decode": ["decode", "trained", "--prompt=def ", "--max-tokens=100"],
    "inspect-input": ["inspect-input", "tiny"],
    "plot": ["plot", "trained"],
    "checkpoints verify": ["checkpoints", "verify", "trained"],
}
# A part of the result that each prints at its end.
RESULTS = {
    "train": "Next: pax plot",
    "eval": "loss",
    "decode": "def ",
    "inspect-input": "train:",
    "plot": "trained",
    "checkpoints verify": "60",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    with Process(folder, *VERBS["train"]) as process:
        code, report = process.end()
    assert code == 0, report
    return folder / "run"


def _handles(process: Process, number: int) -> bool:
    """Whether a process has a handler for a signal: pax installs its own before it loads anything."""
    status = pathlib.Path(f"/proc/{process.process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _signal(folder: pathlib.Path, verb: str, number: int, delay: float) -> tuple[int, str, float]:
    """Exit code, output, and the seconds from a signal to the end."""
    with Process(folder, *VERBS[verb]) as process:
        wait_until(lambda: _handles(process, signal.SIGTERM), process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(delay)
        started = time.monotonic()
        process.signal(number)
        code, report = process.end()
    return code, report, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_signals_at_any_time_to_every_verb(straight, tmp_path, counts, scale, number):
    shutil.copytree(straight, tmp_path / "trained")
    moments = random.Random(number)
    for turn in range(scale(20)):
        verb = "train" if turn % 2 == 0 else list(VERBS)[1 + turn // 2 % (len(VERBS) - 1)]
        code, report, seconds = _signal(tmp_path, verb, number, moments.uniform(0, 8))
        assert "Traceback" not in report and "bug in pax" not in report, report
        begun = f"Received {number.name}" in report
        # Python drops its handlers at its very end, when the result is out.
        after_the_end = [-number] if RESULTS[verb] in report else []
        assert code in ([75, 0] if begun else [128 + number, 0, *after_the_end]), (verb, code, report)
        assert seconds < LIMIT
        counts.add(number.name, f"{verb}: exit code {code}", seconds=seconds if code else None)
        if verb == "train" and code == 0:
            assert_same_run(tmp_path / "run", straight)
            shutil.rmtree(tmp_path / "run")
    with train(tmp_path, eval_interval_steps=5) as process:
        code, report = process.end()
    assert code == 0, report
    assert_same_run(tmp_path / "run", straight)
