"""The user's own code, which a program that is kept, or that was saved, may depend on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.programs import executable
from paxcli.programs.ahead_of_time import compile_ahead, target_of
from paxcli.programs.executable import load_executable
from paxcli.training.session import build_session

_PRINT = "from paxcli.programs.own_code import find_own_code\nprint(*sorted(find_own_code()))\n"
_SMALL = ("num_layers=1", "model_dims=16", "hidden_dims=16", "num_heads=1", "max_seq_len=16", "eval_inputs=[]")


def _own_code(directory: pathlib.Path, *command: str) -> list[str]:
    root = str(pathlib.Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_script_and_typed_in_code_are_the_users_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "script.py").write_text(f"import helper\n{_PRINT}")
    assert _own_code(tmp_path, "script.py") == ["__main__", "helper"]
    assert _own_code(tmp_path, "-c", _PRINT) == ["__main__"]  # as in a notebook: a main module without a file


def test_a_saved_step_of_changed_code_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = {"own_layer": "old", "only_when_compiled": "1", "__main__": "compiling"}
    monkeypatch.setattr(executable, "find_own_code", lambda: dict(code))
    config, path = resolve("tiny-synthetic", (), _SMALL).config, tmp_path / "step.pax"
    compile_ahead(config, target_of(config, "cpu:1", None), save=path)
    code.clear()
    code.update({"own_layer": "old", "only_in_training": "1", "__main__": "training"})
    session = build_session(config)
    load_executable(path, session)
    code["own_layer"] = "new"
    with pytest.raises(ConfigError, match=r"code: .*old.* → .*new"):
        load_executable(path, session)
