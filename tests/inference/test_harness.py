"""Tasks of lm-eval on an imported model, against lm-eval's own `hf` model (tests/data/lm_eval_hf.py)."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import paxcli as pax
from paxcli.errors import MissingError
from tests.conftest import ROOT
from tests.inference.lm_eval_tasks import TASKS, write_model, write_tasks

HF = json.loads((ROOT / "tests/data/lm_eval_hf.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pax.Run:
    folder = tmp_path_factory.mktemp("imported")
    pax.import_weights(write_model(folder / "hf"), folder / "run")
    return pax.Run(folder / "run")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> pathlib.Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks", HF["answers"])


def evaluate(folder: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The verb in a process of its own: lm-eval's libraries warn, and start threads."""
    command = [sys.executable, "-m", "paxcli", "eval", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--tasks", "local_choise"], 2, "has no task `local_choise`.\nhint: Did you mean `local_choice`"),
        (["--tasks", "local_choice", "--step", "7"], 5, "has no checkpoint of step 7.\nhint: It has: 0."),
        (["--limit", "7"], 2, "There is no task to run.\nhint: Name one"),
        (["--tasks", "local_answer", "--apply-chat-template"], 2, "The run has no chat template."),
        (["--tasks", "broken"], 5, "lm-eval cannot run broken: "),
    ],
    ids=["unknown", "step", "none", "chat", "broken"],
)
def test_mistakes(run, tasks, words, code, message):
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    done = evaluate(tasks.parent, run.path, *words, "--tasks-dir", tasks)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False) and message in done.stderr, done.stderr


def test_without_the_extra_the_error_names_it(run, tasks, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "paxcli.inference.harness", raising=False)
    with pytest.raises(MissingError, match="Tasks need lm-eval") as caught:
        run.evaluate(tasks=["local_choice"], tasks_dir=tasks)
    assert caught.value.hint == "pip install 'paxcli[eval]'"


@pytest.mark.parametrize("num_fewshot", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_scores_are_those_of_transformers(run, tasks, num_fewshot):
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    words = ["--tasks", ",".join(TASKS), "--tasks-dir", tasks, "--num-fewshot", num_fewshot, "--json"]
    done = evaluate(tasks.parent, run.path, *words)
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout)["metrics"], HF["results"][str(num_fewshot)]["metrics"]
    assert 0 < expected["local_choice"]["acc"] < 1  # neither none nor all
    assert 0 < HF["results"]["0"]["metrics"]["local_answer"]["exact_match"] < 1
    assert {task: found[task]["num_examples"] for task in TASKS} == dict(zip(TASKS, (16, 8, 4), strict=True))
    for task, values in expected.items():
        assert found[task]["num_fewshot"] == num_fewshot
        np.testing.assert_allclose([found[task][name] for name in values], list(values.values()), rtol=1e-5)
    written = json.loads((pathlib.Path(run.path) / "eval/0-tasks.json").read_text())
    assert written == {"step": 0, "metrics": found}
