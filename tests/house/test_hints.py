"""Every error that a user can cause has a next step."""

from __future__ import annotations

import ast
import pathlib

import pytest

from paxcli import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.PaxError)}
# Their errors are the cause in an error of the one who reads the checkpoint, or are never shown.
PARTS = {"checkpoint/local_tier.py", "checkpoint/manifest.py", "checkpoint/reading.py", "cloud/jobs.py"}
FILES = [path for path in sorted(ROOT.glob("paxcli/**/*.py")) if str(path.relative_to(ROOT / "paxcli")) not in PARTS]


def lacks_hint(call: ast.Call) -> bool:
    """Whether a call makes an error without a hint, or with one that is None where no name is similar."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "hint")]
    makes_error = ast.unparse(call.func) in (*TYPES, "self.refuse")
    if not makes_error or any(isinstance(argument, ast.Starred) for argument in arguments):
        return False
    return len(arguments) < 2 or (
        isinstance(hint := arguments[1], ast.Call) and ast.unparse(hint.func) == "did_you_mean"
    )


@pytest.mark.parametrize("source", ["ConfigError('No.')", "DataError('No.', did_you_mean(name, names))"])
def test_the_check_sees_errors_without_a_hint(source: str) -> None:
    assert any(lacks_hint(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def test_every_error_has_a_hint() -> None:
    calls = {
        path: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)] for path in FILES
    }
    found = [f"{path.name}:{call.lineno}" for path, made in calls.items() for call in made if lacks_hint(call)]
    assert found == []
