"""`pax pgle` as a user without a GPU meets it, and options of `pax train` that do not go together."""

from __future__ import annotations

import json
import os

import pytest
from etils import epath

from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.jax_defaults import configure_jax
from paxcli.profiling.costs import encode, write_costs


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_cpu_gives_no_profile(pax, tmp_path, options):
    done = pax("pgle", "collect", "tiny", "--json", *options)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] == 3
    assert "This device (cpu) gives no profile" in error["message"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--pgle-runs=2",), "--auto-pgle"),
        (("--auto-pgle", "--expect-pgle"), "one of them"),
        (("--auto-pgle", "--profile-steps=1:2"), "ahead of time"),
    ],
)
def test_options_that_contradict(options, named, capsys):
    assert run(app, ["train", "tiny", *options, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert named in error["message"] + error["hint"]


def test_show(tmp_path, capsys):
    write_costs(encode({"ab12::dot.1": 30.5, "ab12::copy.2": 1.0}), epath.Path(tmp_path / "profile"))
    for name in ("profile.pb", "profile.pbtxt"):
        assert run(app, ["pgle", "show", str(tmp_path / name), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["instructions"] == 2 and shown["total_microseconds"] == 31.5
        assert shown["costliest"][0] == {"name": "dot.1", "microseconds": 30.5}
    assert run(app, ["pgle", "show", str(tmp_path / "none.pb"), "--json"]) == 5


@pytest.mark.parametrize("given", [{}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}])
def test_the_memory_of_a_gpu_is_the_users_to_divide(given, monkeypatch, tmp_path):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.setenv(name, given.get(name, ""))  # so that the test leaves them as they were
        if name not in given:
            monkeypatch.delenv(name)
    configure_jax()
    assert {name: os.environ[name] for name in names if name in os.environ} == (given or {names[0]: "0.92"})
