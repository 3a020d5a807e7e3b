"""A short run, for commands that read one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.training.runs import small


def quick(**changes: object) -> list[str]:
    """Options of a short run."""
    return small(**{"num_train_steps": 20, "eval_interval_steps": None, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a short run."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    options = quick(**{"train_input.input_random_seed": None})
    command = [sys.executable, "-m", "paxcli", "train", "tiny", *options, "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return run_dir, json.loads(done.stdout), done
