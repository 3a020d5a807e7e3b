"""A job of two processes loses one: the other ends with exit code 75 and a sentence, in bounded time, and resumes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from tests.devices import cpu_devices
from tests.faults.processes import Process, last_step, start_job, wait_until
from tests.jobs import free_port, job_variables
from tests.training.runs import small

HEARTBEAT = 10
STUCK = '''
"""Inputs that never return a batch: the first, or the 13th to process 1."""

import dataclasses
import time

import jax

from pax_recipes.tiny import tiny_synthetic
from paxcli.config.recipe import recipe
from paxcli.inputs.synthetic import SyntheticInput


@dataclasses.dataclass
class StuckInput(SyntheticInput):
    """Synthetic rows, until it hangs."""

    def get_next(self):
        self.served = getattr(self, "served", 0) + 1
        if self.served > 12 and jax.process_index() == 1:
            time.sleep(10_000)
        return super().get_next()


@dataclasses.dataclass
class SilentInput(SyntheticInput):
    """Knows its shapes, or not, and returns nothing."""

    known: bool = True

    def element_spec(self):
        return super().element_spec() if self.known else self.peek()

    def get_next(self):
        time.sleep(10_000)


@recipe()
def stuck():
    """Hangs after some steps."""
    config = tiny_synthetic()
    config.train_input = StuckInput.config()
    return config


@recipe()
def silent():
    """Hangs before the first step."""
    config = tiny_synthetic()
    config.train_input = SilentInput.config()
    return config
'''


def _options(steps: int) -> list[str]:
    limits = {"heartbeat_timeout_seconds": HEARTBEAT, "start_timeout_seconds": 60.0}
    return [*small(num_train_steps=steps, global_batch_size=4, eval_interval_steps=None, **limits), "--allow-changed"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda n: n.name)
def test_the_other_process_asks_for_a_restart(tmp_path, counts, number, victim):
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start_job(tmp_path, _options(1_000_000))]
        wait_until(lambda: last_step(tmp_path / "run") >= 20, jobs[0])
        started = time.monotonic()
        jobs[victim].signal(number)
        code, report = jobs[1 - victim].end(6 * HEARTBEAT)
        seconds = time.monotonic() - started
    assert code == 75, report
    last = report.strip().splitlines()[-2]
    if number == signal.SIGTERM:
        assert "Stopped by a signal to another process and saved at step" in last
    else:
        assert "Another process of this job ended or cannot be reached" in last
    assert seconds < 3 * HEARTBEAT
    counts.add(f"{number.name} to one of two processes", "exit code 75, then resumed", seconds)

    # Together they resume.
    done = last_step(tmp_path / "run")
    steps = done + 20
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(job) for job in start_job(tmp_path, _options(steps))]
        ends = [job.end() for job in jobs]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "Resuming" in ends[0][1] and last_step(tmp_path / "run") == steps


@pytest.mark.slow
@pytest.mark.faults
def test_a_process_that_hangs_ends_both(tmp_path, counts):
    """Its input never returns: the watchdog of one of them prints the stacks, and both ask for a restart."""
    (tmp_path / "stuck.py").write_text(STUCK)
    port, limit = free_port(), 40.0
    with contextlib.ExitStack() as stack:
        jobs = []
        for index in range(2):
            command = ("train", "./stuck.py:stuck", *_options(60), f"--set=step_timeout_seconds={limit}")
            env = job_variables(port, index)
            job = Process(tmp_path, *command, "--run-dir=run", env=env, name=f"process-{index}")
            jobs.append(stack.enter_context(job))
        ends = [job.end(300) for job in jobs]
    assert [code for code, _ in ends] == [75, 75], ends
    assert any("error: No batch, step or save" in report for _, report in ends), ends
    assert last_step(tmp_path / "run") >= 10
    counts.add("hang of one of two processes", "exit code 75 of both")


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("known", [True, False])
def test_a_first_batch_that_never_comes_ends_the_run(tmp_path, known):
    """Also if the shapes of its input are only known from a batch."""
    (tmp_path / "stuck.py").write_text(STUCK)
    command = ("train", "./stuck.py:silent", *_options(60), "--set=step_timeout_seconds=5", f"--set=known={known}")
    with Process(tmp_path, *command, "--run-dir=run") as job:
        code, report = job.end(300)
    assert code == 75, report
    assert "in get_next" in report and "error: No batch, step or save" in report


@pytest.mark.slow
@pytest.mark.faults
def test_an_error_of_one_process_keeps_its_exit_code(tmp_path, counts):
    """It does not wait for the others, and they do not wait for it."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(job) for job in start_job(tmp_path, [*_options(100_000), "--set=learning_rate=1e40"])
        ]
        codes = [job.end(6 * HEARTBEAT + 60)[0] for job in jobs]
    assert codes[0] == 6 and codes[1] in (6, 75)
    counts.add("divergence of two processes", "exit code 6")


@pytest.mark.slow
@pytest.mark.faults
def test_a_signal_stops_a_job_that_hardly_ever_reports(tmp_path):
    """Processes agree to stop within seconds, not at the next report: a preemption gives them half a minute."""
    with contextlib.ExitStack() as stack:
        options = [*_options(1_000_000), "--set=summary_interval_steps=500000"]
        jobs = [stack.enter_context(job) for job in start_job(tmp_path, options)]
        wait_until(lambda: last_step(tmp_path / "run") >= 1, jobs[0])
        jobs[1].signal(signal.SIGTERM)
        ends = [job.end(3 * HEARTBEAT) for job in jobs]
    assert [code for code, _ in ends] == [75, 75], ends
    assert all("SIGTERM" in output or "a signal to another process" in output for _, output in ends), ends


@pytest.mark.slow
@pytest.mark.faults
def test_a_changed_recipe_is_refused_by_each_process(tmp_path):
    """With 75, that of a lost process, a scheduler would start the job again and again."""
    options = small(num_train_steps=10, eval_interval_steps=None, ici_mesh_shape="{data: 2}")
    for more, code in (((), 0), (("--set=learning_rate=0.5",), 2)):
        with contextlib.ExitStack() as stack:
            jobs = [stack.enter_context(job) for job in start_job(tmp_path, [*options, *more])]
            ends = [job.end() for job in jobs]
        assert [end[0] for end in ends] == [code, code], ends
        assert not more or all("learning_rate: 0.01 → 0.5" in output for _, output in ends), ends


@pytest.mark.slow
@pytest.mark.faults
def test_different_recipes_are_refused_by_each_process(tmp_path):
    """Each trained its own part of the parameters, at its own learning rate."""
    port, jobs = free_port(), []
    with contextlib.ExitStack() as stack:
        for index, rate in enumerate((0.01, 0.5)):
            options = small(
                num_train_steps=10, eval_interval_steps=None, learning_rate=rate, ici_mesh_shape="{fsdp: 2}"
            )
            env = cpu_devices(1) | job_variables(port, index)
            job = Process(tmp_path, "train", "tiny-synthetic", *options, "--run-dir=run", env=env, name=f"{index}")
            jobs.append(stack.enter_context(job))
        ends = [job.end() for job in jobs]
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("The recipe of process 1 of this job is not that of process 0" in output for _, output in ends), ends
    assert not (tmp_path / "run" / "config.txt").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_stays_alone_asks_for_a_restart(tmp_path, index):
    options = ("train", "tiny-synthetic", "--set=start_timeout_seconds=1.0", "--run-dir=run")
    with Process(tmp_path, *options, env=job_variables(free_port(), index)) as process:
        code, report = process.end()
    assert code == 75, report
    assert "not all processes connected within 1.0 s" in report
    assert not (tmp_path / "run").exists()


def test_a_hang_prints_all_stacks_and_asks_for_a_restart():
    code = """
import time
from paxcli.training.watchdog import Watchdog

def hang():
    time.sleep(100)

watchdog = Watchdog(0.5)
with watchdog:
    for _ in range(10):
        time.sleep(0.1)
        watchdog.beat()
time.sleep(1)
print("alive", flush=True)
with watchdog:
    hang()
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "alive\n"), done.stderr
    assert "in hang" in done.stderr and "error: No batch, step or save" in done.stderr
    assert time.monotonic() - started < 30
