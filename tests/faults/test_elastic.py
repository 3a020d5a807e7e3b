"""A run resumes on other numbers of processes and devices: the same losses, each example once and none left out."""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np
import pytest

from tests.devices import cpu_devices
from tests.faults.processes import Process
from tests.jobs import free_port, job_variables
from tests.training.runs import losses, small

RECIPE = '''
"""`tiny`, with a log of the examples that training reads."""

import os
import sys

from pax_recipes.tiny import tiny
from paxcli.config.recipe import recipe
from paxcli.inputs.stdlib import StdlibInput


class LoggedInput(StdlibInput):
    """Appends the numbers of the examples that a train step uses to a file of each process."""

    def rows(self, numbers):
        self.numbers = numbers
        return super().rows(numbers)

    def get_next(self):
        batch = super().get_next()
        if "_next_batch" in (sys._getframe(depth).f_code.co_name for depth in (2, 3)):
            with open(f"examples-{os.getpid()}", "a") as file:
                file.write(" ".join(map(str, self.numbers)) + "\\n")
        return batch


@recipe()
def logged():
    """The recipe."""
    config = tiny()
    config.train_input = LoggedInput.config()
    return config
'''


def _train(folder: pathlib.Path, steps: int, processes: int = 1, devices: int = 1) -> list[int]:
    """Trains to a step; returns the examples that this part of the run used, sorted."""
    shape = f"{{data: {processes * devices}}}"
    changes = small(
        num_train_steps=steps, global_batch_size=8, eval_interval_steps=None, ici_mesh_shape=shape, decay_end=40
    )
    port = free_port()
    with contextlib.ExitStack() as stack:
        jobs = []
        for index in range(processes):
            env = cpu_devices(devices)
            if processes > 1:
                env |= job_variables(port, index, processes)
            command = ("train", "./logged.py:logged", *changes, "--run-dir=run", "--allow-changed")
            jobs.append(stack.enter_context(Process(folder, *command, env=env, name=f"process-{index}")))
        ends = [job.end() for job in jobs]
    assert [code for code, _ in ends] == [0] * processes, ends
    files = list(folder.glob("examples-*"))
    assert len(files) == processes
    examples = [int(number) for file in files for number in file.read_text().split()]
    for file in files:
        file.unlink()
    return sorted(examples)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Losses and examples of a run on one device."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "logged.py").write_text(RECIPE)
    return _train(folder, 40), losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [[(1, 1), (2, 1), (1, 1)], [(1, 8), (1, 4), (1, 2), (1, 1)]], ids=["processes-1-2-1", "devices-8-4-2-1"]
)
def test_other_processes_and_devices_continue_the_same_run(straight, tmp_path, parts):
    (tmp_path / "logged.py").write_text(RECIPE)
    read = []
    for number, (processes, devices) in enumerate(parts):
        read += _train(tmp_path, 10 * (number + 1) if number + 1 < len(parts) else 40, processes, devices)
    examples, expected = straight
    assert len(set(read)) == len(read) == 40 * 8
    assert sorted(read) == examples
    found = losses(tmp_path / "run")
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
