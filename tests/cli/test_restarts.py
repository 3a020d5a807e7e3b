"""`--restarts`: which exits are restarted, and that a restarted run ends as if nothing had happened."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.processes import assert_same_run, last_step, train, wait_until

SCRIPT = """
import os, signal, sys, time
import typer
from paxcli.cli.restarts import keep_restarting
from paxcli.log import setup_logging

setup_logging()
try:
    keep_restarting(2, pause=0.05)
except typer.Exit as end:
    sys.exit(end.exit_code)
with open("attempts", "a") as file:
    file.write("x")
print("result of attempt", os.path.getsize("attempts"), flush=True)
"""

# A directory, since an exception while a file object is destroyed would be lost.
WAIT = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); os.mkdir('ready'); time.sleep(60)"


@pytest.mark.parametrize(
    ("end", "code", "attempts"),
    [
        ("sys.exit(0)", 0, 1),
        ("sys.exit(2)", 2, 1),
        ("sys.exit(3)", 3, 1),
        ("sys.exit(5)", 5, 1),
        ("sys.exit(6)", 6, 1),
        ("sys.exit(1)", 1, 1),
        ("sys.exit(4)", 4, 3),
        ("sys.exit(75)", 75, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 3),
        ("sys.exit(75 if os.path.getsize('attempts') < 2 else 0)", 0, 2),
    ],
)
def test_only_exits_that_a_restart_can_help_with_are_restarted(tmp_path, end, code, attempts):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "attempts").read_text() == "x" * attempts
    assert done.stdout == f"result of attempt {attempts}\n"
    assert done.stderr.count("restart ") == attempts - 1


def test_a_signal_is_passed_on_and_ends_the_restarts(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SCRIPT + WAIT], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 75
    assert (tmp_path / "attempts").read_text() == "x"


def test_a_signal_while_a_process_starts_is_passed_on(tmp_path):
    start = """
import os, signal, subprocess, time
start = subprocess.Popen

def start_and_signal(*arguments, **options):
    process = start(*arguments, **options)
    while not os.path.exists("ready"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return process

subprocess.Popen = start_and_signal
"""
    done = subprocess.run([sys.executable, "-c", start + SCRIPT + WAIT], cwd=tmp_path, timeout=50)
    assert done.returncode == 75
    assert (tmp_path / "attempts").read_text() == "x"


def _child(pid: int) -> int | None:
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.slow
def test_a_killed_run_ends_like_one_that_was_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with train(tmp_path / "a") as straight:
        assert straight.end()[0] == 0
    with train(tmp_path / "b", "--restarts=3", "--json") as process:
        for step in (10, 30):
            wait_until(lambda step=step: last_step(tmp_path / "b" / "run") >= step, process)
            subprocess.run(["kill", f"-{signal.SIGKILL}", str(_child(process.process.pid))], check=True)
            time.sleep(0.5)
        code, report = process.end()
    assert code == 0, report
    assert report.count("Exit code 137: restart") == 2 and process.out.read_text().count('{"run_dir"') == 1
    assert_same_run(tmp_path / "b" / "run", tmp_path / "a" / "run")
