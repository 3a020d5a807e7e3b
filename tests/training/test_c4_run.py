"""A C4 recipe on a directory of C4: as a user runs it, and killed."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.inputs.seqio_tasks import write_c4
from tests.training.runs import evals, losses

# The recipe of the command line, with an input that tells what it hands out, as docs/inputs.md shows.
RECIPE = """
import os, zlib
import fiddle as fdl
from paxcli.config.recipe import recipe
from paxcli.inputs.c4 import C4Input
from pax_recipes.c4 import c4_1b


class Telling(C4Input):
    def get_next(self):
        batch = super().get_next()
        state = self.get_state()
        with open(os.environ["TOLD"], "a") as file:
            print(self.name, state["pass"], state["row"], zlib.crc32(batch.ids), file=file, flush=True)
        return batch


@recipe()
def telling():
    config = c4_1b()
    for source in (config.train_input, config.eval_inputs[0]):
        fdl.update_callable(source, Telling)
    return config
"""
SIZES = {
    "c4.path": ".",
    "c4.tokenizer_path": "c4.model",
    "model.vocab_size": 260,
    "model.num_layers": 1,
    "max_seq_len": 64,
    "num_train_steps": 60,
    "task.train.eval_interval_steps": 60,
    "save_interval_steps": 10,
    "summary_interval_steps": 1,
}
ARGUMENTS = [
    "train",
    "mine.py:telling",
    "--overlay",
    "cpu",
    *(f"--set={path}={value}" for path, value in SIZES.items()),
]


@pytest.fixture
def told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The directory of a user who has C4 and the recipe; and what the inputs of a run told."""
    write_c4(tmp_path)
    (tmp_path / "mine.py").write_text(RECIPE)

    def read(name: str, split: str = "train") -> list[tuple[int, int, int]]:
        lines = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        return [tuple(map(int, line[1:])) for line in lines if line[0] == split]  # type: ignore[misc]

    return read


@pytest.mark.slow
def test_it_learns_and_resumes_after_a_kill(tmp_path: pathlib.Path, told, pax) -> None:
    whole = pax(*ARGUMENTS, "--run-dir", "whole", env={"TOLD": "whole.txt"})
    assert whole.returncode == 0, whole.stderr
    series = losses(tmp_path / "whole")
    assert series[60] < series[1] - 1

    # Killed at its 25th batch or so, and resumed.
    command = [sys.executable, "-m", "paxcli", *ARGUMENTS, "--run-dir", "killed"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "TOLD": "killed.txt"}) as process:
        deadline = time.monotonic() + 700
        while not (tmp_path / "killed.txt").exists() or len(told("killed.txt")) < 25:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    resumed = pax(*ARGUMENTS, "--run-dir", "killed", env={"TOLD": "killed.txt"})
    assert resumed.returncode == 0 and "Resuming" in resumed.stderr, resumed.stderr
    assert losses(tmp_path / "killed") == series
    times = collections.Counter(told("whole.txt"))
    assert len(times) == 60 and set([*times.values()][1:]) == {1}  # the first one is looked at before, too
    assert list(dict.fromkeys(told("killed.txt"))) == list(times)

    done = pax("--trust-code", "eval", "whole", "--json", env={"TOLD": "eval.txt"})
    metrics = json.loads(done.stdout)["metrics"]["c4-validation"]
    logged = evals(tmp_path / "whole")[60]
    assert {name: logged[name] for name in metrics} == metrics
    assert collections.Counter(told("eval.txt", "c4-validation")).most_common(1)[0][1] == 1
    line = json.loads((tmp_path / "whole" / "eval" / "metrics.jsonl").read_text())
    assert line == {"step": 60, "split": "eval/c4-validation", **metrics}
    assert list((tmp_path / "whole" / "eval" / "tensorboard").rglob("*tfevents*"))
