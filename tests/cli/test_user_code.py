"""Mistakes in the user's own layer, input or schedule: each named with its file, its line and its contract."""

from __future__ import annotations

import contextvars
import sys

import pytest

from paxcli.cli.main import app
from paxcli.cli.output import run
from tests.test_own_parts import FILES, SMALL, SMALL_MODEL


@pytest.mark.parametrize(
    ("file", "recipe", "right", "wrong", "named"),
    [
        ("rows.py", "counting", "def rows(self, numbers)", "def rows(self, rows)", r"Counting.rows failed: NameError"),
        ("layer.py", "gated", "(x @ self.w_in)", "(self.w_in @ x)", r"GatedRelu.__call__ failed: TypeError"),
        ("flax_modules.py", "linen", '"embed"))(h)', '"embed"))(g)', r"LinenFeedForward.__call__ failed: NameError"),
        ("flax_modules.py", "bridged", "gelu(self.w_in(", "gelu(self.w(", r"NnxFeedForward.__call__ failed: Attr"),
        (
            "optimizer.py",
            "signum",
            "return jnp.clip(",
            "return None, jnp.clip(",
            "may not return what its contract states",
        ),
    ],
)
def test_a_mistake_is_named(file, recipe, right, wrong, named, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("pax_recipe_file.")]:
        monkeypatch.delitem(sys.modules, name)
    text = FILES[file].replace(right, wrong)
    assert text != FILES[file]
    (tmp_path / file).write_text(text)
    sets = {**SMALL, **SMALL_MODEL, "eval_inputs": "[]", "eval_interval_steps": "null"}
    arguments = ["train", f"{tmp_path / file}:{recipe}", f"--run-dir={tmp_path / 'run'}"]
    arguments += [f"--set={path}={value}" for path, value in sets.items()]
    assert contextvars.copy_context().run(run, app, arguments) == 2
    report = capsys.readouterr().err
    assert named in report and str(tmp_path / file) in report and "bug in pax" not in report and ".. " not in report
    if "failed" in named:
        line = next(number for number, line in enumerate(text.splitlines(), 1) if wrong in line)
        assert f"{file}:{line + (file == 'rows.py')}" in report and "Traceback" not in report
        assert ("inherits paxcli." in report) == (file != "flax_modules.py")
