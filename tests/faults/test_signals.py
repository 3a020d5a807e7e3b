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

from tests.faults.conftest import percentile
from tests.faults.processes import Process, assert_same_run, train, wait_until
from tests.training.runs import small

LIMIT = 30.0  # seconds from a signal to the end, on a loaded machine
QUIET = 5.0  # the same, on a quiet one, of nineteen in twenty

VERBS = {
    "train": ["train", "tiny", *small(eval_interval_steps=5), "--run-dir=run"],
    "eval": ["eval", "trained"],
    "decode": ["decode", "trained", "--prompt=def ", "--max-tokens=100"],
    "inspect-input": ["inspect-input", "tiny"],
    "plot": ["plot", "trained"],
    "checkpoints verify": ["checkpoints", "verify", "trained"],
    "data tokenize": ["data", "tokenize", "text.jsonl", "--out", "tokens"],
}
# A part of the result that each prints at its end.
RESULTS = {
    "train": "Next: pax plot",
    "eval": "loss",
    "decode": "def ",
    "inspect-input": "train:",
    "plot": "trained",
    "checkpoints verify": "60",
    "data tokenize": "tokens",
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
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 20_000)
    moments, latest, of_train = random.Random(number), dict.fromkeys(VERBS, 8.0), []
    turn = 0
    while turn < scale(20):
        verb = "train" if turn % 2 == 0 else list(VERBS)[1 + turn // 2 % (len(VERBS) - 1)]
        moment = moments.uniform(0, latest[verb])
        code, report, seconds = _signal(tmp_path, verb, number, moment)
        assert "Traceback" not in report and "bug in pax" not in report, report
        begun = f"Received {number.name}" in report
        # Python drops its handlers at its very end, when the result is out.
        after_the_end = [-number] if RESULTS[verb] in report else []
        assert code in ([75, 0] if begun else [128 + number, 0, *after_the_end]), (verb, code, report)
        assert seconds < LIMIT
        if verb == "train" and code == 0:
            assert_same_run(tmp_path / "run", straight)
            shutil.rmtree(tmp_path / "run")
        if code == 0:  # too late: the next signals come earlier
            latest[verb] = min(latest[verb], 0.8 * moment)
            continue
        turn += 1
        counts.add(f"{number.name} to `{verb}`", f"exit code {code}", seconds)
        of_train += [seconds] if verb == "train" else []
    if len(of_train) >= 10:  # all of them, on a machine that is said to be quiet
        assert percentile(of_train, 0.95) <= QUIET
    with train(tmp_path, eval_interval_steps=5) as process:
        code, report = process.end()
    assert code == 0, report
    assert_same_run(tmp_path / "run", straight)
