"""Kill a run anywhere: it ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.training.runs import evals, final_arrays, losses, small


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nobody interrupts."""
    run_dir = tmp_path_factory.mktemp("straight") / "a"
    assert _run(run_dir)[0] == 0
    return run_dir


@contextlib.contextmanager
def _start(run_dir, *options: str, **changes: object) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "paxcli", "train", "tiny", *small(**changes), "--run-dir", str(run_dir), *options]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=os.environ, **pipes) as process:
        yield process


def _run(run_dir, *options: str, **changes: object) -> tuple[int, str]:
    """Exit code and report of a run that nobody interrupts."""
    with _start(run_dir, *options, **changes) as process:
        _, report = process.communicate(timeout=600)
    return process.returncode, report


def _wait_for_step(process: subprocess.Popen, run_dir, step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and max(losses(run_dir), default=0) >= step:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    raise AssertionError(f"step {step} was never logged")


def _assert_same(run_dir, straight) -> None:
    assert losses(run_dir) == losses(straight)
    for step, metrics in evals(straight).items():
        assert evals(run_dir)[step] == metrics
    ours, theirs = final_arrays(run_dir), final_arrays(straight)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_sigkill_at_three_steps(straight, tmp_path):
    run_dir = tmp_path / "b"
    for step in (10, 20, 40):
        with _start(run_dir) as process:
            _wait_for_step(process, run_dir, step)
            process.kill()
            assert process.wait(30) == -signal.SIGKILL
    code, report = _run(run_dir)
    assert code == 0, report
    _assert_same(run_dir, straight)


@pytest.mark.parametrize(
    "number", [*(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP)), signal.SIGTERM]
)
def test_one_signal_saves_and_stops(straight, tmp_path, number):
    run_dir = tmp_path / "c"
    with _start(run_dir) as process:
        _wait_for_step(process, run_dir, 10)
        for _ in range(1 + (number == signal.SIGHUP)):  # of which a closed terminal sends several
            process.send_signal(number)
        _, report = process.communicate(timeout=300)
    assert process.returncode == 75, report
    assert f"Received {number.name}" in report and "Traceback" not in report
    assert "saved at step" in report
    code, report = _run(run_dir)
    assert code == 0, report
    _assert_same(run_dir, straight)


def test_two_signals_stop_at_once(tmp_path):
    run_dir = tmp_path / "d"
    with _start(run_dir, num_train_steps=100_000) as process:
        _wait_for_step(process, run_dir, 10)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, report = process.communicate(timeout=300)
    assert process.returncode in (75, -signal.SIGINT), report  # the kernel may merge two signals into one
    assert "Traceback" not in report


def test_a_closed_terminal_saves_and_stops(tmp_path):
    """While it writes there, with a progress bar, whose thread has locks of the console."""
    run_dir = tmp_path / "r"
    command = [
        sys.executable,
        "-m",
        "paxcli",
        "train",
        "tiny",
        *small(num_train_steps=100_000, summary_interval_steps=1),
    ]
    ours, theirs = os.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    in_terminal = ["env", "--default-signal=HUP", "setsid", "--ctty"]  # these tests may run under `nohup`
    with subprocess.Popen([*in_terminal, *command, "--run-dir", run_dir], **terminal) as process:
        os.close(theirs)
        shown = b""
        while b"step 10 " not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(100) == 75, shown.decode()
    assert list((run_dir / "checkpoints").iterdir())


def test_a_reader_of_its_output_that_goes_away_ends_no_run(tmp_path):
    with _start(tmp_path / "q", num_train_steps=20) as process:
        process.stderr.readline()
        process.stderr.close()
        assert process.wait(300) == 0
    assert (tmp_path / "q/checkpoints/20").exists()


def test_a_finished_run_says_so(straight):
    def stamps():
        return {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file() and p.name != ".lock"}

    before = stamps()
    code, report = _run(straight)
    assert code == 0 and "is finished" in report
    assert stamps() == before


def test_a_changed_recipe_is_refused(straight):
    code, report = _run(straight, learning_rate=0.5, num_layers=2)
    assert code == 2
    assert "learning_rate" in report and "num_layers" in report and "Traceback" not in report
    code, report = _run(straight, "--allow-changed", num_layers=2)
    assert code == 2 and "num_layers" in report


@pytest.mark.slow
def test_safe_changes_can_be_allowed(tmp_path):
    run_dir = tmp_path / "e"
    assert _run(run_dir, num_train_steps=20)[0] == 0
    code, report = _run(run_dir, num_train_steps=30)
    assert code == 2 and "--allow-changed" in report
    assert _run(run_dir, "--allow-changed", num_train_steps=30)[0] == 0
    assert max(losses(run_dir)) == 30


@pytest.mark.slow
def test_another_mesh_goes_on(tmp_path, pax):
    """Eight devices begin, one ends: the parameters are the ones that were saved."""
    first = pax(
        "train", "tiny", *small(num_train_steps=10, ici_mesh_shape="{fsdp: 4, tensor: 2}"), "--run-dir=f", devices=8
    )
    assert first.returncode == 0, first.stderr
    eight = losses(tmp_path / "f")
    second = pax("train", "tiny", *small(num_train_steps=20), "--run-dir=f", "--allow-changed")
    assert second.returncode == 0, second.stderr
    assert "step 10" in second.stderr
    assert {step: loss for step, loss in losses(tmp_path / "f").items() if step <= 10} == eight


def test_warm_start_takes_what_fits(straight, tmp_path, pax):
    done = pax("train", "tiny", *small(num_train_steps=1), "--run-dir=g", f"--from={straight}@60")
    assert done.returncode == 0, done.stderr
    assert "Loaded" in done.stderr and f"arrays from {straight}" in done.stderr
    # The first loss is that of the trained parameters, not of new ones.
    assert losses(tmp_path / "g")[1] < 4.5 < losses(straight)[1]


@pytest.mark.slow
def test_warm_start_names_what_does_not_fit(straight, tmp_path, pax):
    done = pax("train", "tiny", *small(num_train_steps=1, hidden_dims=128), "--run-dir=h", f"--from={straight}")
    assert done.returncode == 0, done.stderr
    assert "Another shape" in done.stderr and "w_in" in done.stderr


@pytest.mark.slow
def test_a_renamed_run_directory_stops_the_run_and_is_not_created_again(tmp_path):
    run_dir, renamed = tmp_path / "i", tmp_path / "j"
    # Far between, so that no save is in progress at the time of the rename: one would make the old directory again.
    with _start(run_dir, num_train_steps=1_000_000, save_interval_steps=400) as process:
        while not (run_dir / "checkpoints" / "400").exists():
            assert process.poll() is None
            time.sleep(0.01)
        run_dir.rename(renamed)
        _, report = process.communicate(timeout=300)
    assert process.returncode == 3, report
    assert f"The run directory {run_dir} was renamed" in report and "Traceback" not in report
    assert not run_dir.exists()
    code, report = _run(renamed, "--allow-changed", num_train_steps=410, save_interval_steps=400)
    assert code == 0 and "step 400" in report
