"""The user's own code, which a program that is kept, or that was saved, may depend on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

_PRINT = "from paxcli.programs.own_code import find_own_code\nprint(*sorted(find_own_code()))\n"


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
