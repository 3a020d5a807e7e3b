"""Real runs as processes of their own, that faults happen to."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from tests.devices import cpu_devices
from tests.jobs import free_port, job_variables
from tests.training.runs import evals, final_arrays, losses, small

TIMEOUT = 300


class Process:
    """A `pax` command under way, with its output in files, so that no pipe can fill up."""

    def __init__(
        self,
        folder: pathlib.Path,
        *args: str,
        env: dict[str, str] | None = None,
        name: str = "process",
        prefix: Sequence[str] = (),
    ):
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "paxcli", *args],
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, timeout: float = TIMEOUT) -> tuple[int, str]:
        """Exit code and everything that it printed."""
        code = self.process.wait(timeout)
        return code, self.out.read_text() + self.err.read_text()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)


def train(
    folder: pathlib.Path,
    *options: str,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    **changes: object,
) -> Process:
    """`pax train` of a small run in `folder/run`; `prefix`: a command that runs it."""
    return Process(folder, "train", "tiny", *small(**changes), "--run-dir=run", *options, env=env, prefix=prefix)


def wait_until(condition: Callable[[], object], process: Process, timeout: float = TIMEOUT) -> None:
    """Waits for a condition; fails if the process ends before."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.process.poll() is None, process.err.read_text()
        assert time.monotonic() < deadline, process.err.read_text()
        time.sleep(0.005)


def last_step(run_dir: pathlib.Path) -> int:
    """The newest step that was logged; 0 before the first."""
    return max(losses(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def assert_same_run(run_dir: pathlib.Path, straight: pathlib.Path) -> None:
    """All train lines, evaluation metrics and final arrays are equal, bit for bit."""
    assert losses(run_dir) == losses(straight)
    assert evals(run_dir) == evals(straight)
    ours, theirs = final_arrays(run_dir), final_arrays(straight)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def killed_at(match: str, event: int) -> dict[str, str]:
    """Environment of a process that SIGKILLs itself at the n-th file operation on a path that contains `match`."""
    folder = str(pathlib.Path(__file__).with_name("kill_point"))
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "KILL_POINT": json.dumps([match, event])}


def start_job(
    folder: pathlib.Path, options: Sequence[str], count: int = 2, devices: int = 1, env: dict[str, str] | None = None
) -> list[Process]:
    """The processes of one training job, in `folder/run`."""
    port = free_port()
    jobs = []
    for index in range(count):
        flags = cpu_devices(devices)
        command = ("train", "tiny-synthetic", *options, "--run-dir=run")
        own = flags | job_variables(port, index, count) | (env or {})
        jobs.append(Process(folder, *command, env=own, name=f"process-{index}"))
    return jobs
