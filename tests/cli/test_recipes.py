from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.terminal import run_in_terminal

Pax = Callable[..., subprocess.CompletedProcess[str]]


def test_ls(pax: Pax) -> None:
    result = pax("recipes", "ls", "--json")
    entries = json.loads(result.stdout)
    assert result.returncode == 0 and result.stderr == ""
    assert all(entry.keys() == {"name", "pax_name", "summary"} and entry["summary"] for entry in entries)
    names = [entry["name"] for entry in entries]
    assert "tiny" in names and names == sorted(names)
    assert [line.split()[0] for line in pax("recipes", "ls").stdout.splitlines()] == names


def test_ls_fits_a_terminal() -> None:
    command = [sys.executable, "-m", "paxcli", "recipes", "ls"]
    done = run_in_terminal(command, {**os.environ, "COLUMNS": "80"})
    lines = done.stdout.splitlines()
    indented = [line for line in lines if line.startswith(" ")]
    assert done.returncode == 0 and indented and all(len(line) <= 80 for line in lines)
    assert len({len(line) - len(line.lstrip()) for line in indented}) == 1


def test_show(pax_here: Pax) -> None:
    result = pax_here("recipes", "show", "tiny", "--set", "num_layers=2", "--json")
    shown = json.loads(result.stdout)
    assert shown.keys() >= {"name", "pax_name", "parameters", "global_batch_size", "tokens_per_step", "num_devices"}
    assert shown["values"]["task.model.num_layers"] == {"value": 2, "from": "--set"}
    assert shown["tokens_per_step"] == shown["global_batch_size"] * shown["values"]["task.model.max_seq_len"]["value"]


def test_show_as_text_has_no_control_codes(pax_here: Pax) -> None:
    result = pax_here("recipes", "show", "tiny")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout and "num_layers: 4" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["recipes", "show", "tinny"], ["tinny", "`tiny`"]),
        (["recipes", "show", "tiny", "--set", "num_layer=2"], ["num_layer", "`num_layers`"]),
        (["recipes", "show", "tiny", "--set", "num_layers=abc"], ["expected int", "'abc'"]),
        (["recipes", "show", "tiny", "--overlay", "no-such"], ["no overlay `no-such`"]),
        (["recipes", "show"], ["Missing argument", "pax recipes show --help"]),
        (["recipes", "show", "tiny", "--jsno"], ["--jsno", "--json"]),
        (["recipes", "shwo", "tiny"], ["shwo", "show"]),
    ],
)
def test_mistakes_cost_one_screen(pax_here: Pax, args: list[str], words: list[str]) -> None:
    result = pax_here(*args)
    assert result.returncode == 2 and result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr
    assert len(result.stderr.splitlines()) <= 4 and "\x1b" not in result.stderr
    as_json = pax_here(*args, "--json")
    assert as_json.returncode == 2 and as_json.stderr == ""
    error = json.loads(as_json.stdout)["error"]
    assert error.keys() == {"message", "hint", "exit_code"} and error["exit_code"] == 2


def test_cp_then_show(pax_here: Pax, tmp_path: pathlib.Path) -> None:
    dry = pax_here("recipes", "cp", "tiny", "mine.py", "--dry-run")
    assert dry.returncode == 0 and not (tmp_path / "mine.py").exists()
    result = pax_here("recipes", "cp", "tiny", "mine.py")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "mine.py").read_text() == dry.stdout
    (tmp_path / "mine.py").write_text(dry.stdout.replace("num_train_steps = 900", "num_train_steps = 7"))
    assert "num_train_steps = 7" in (tmp_path / "mine.py").read_text()
    compared = json.loads(pax_here("recipes", "diff", "tiny", "./mine.py:tiny", "--json").stdout)
    assert compared["differences"] == {"task.train.num_train_steps": {"a": 900, "b": 7}}


def test_cp_never_overwrites(pax_here: Pax, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    result = pax_here("recipes", "cp", "tiny", "mine.py")
    assert result.returncode == 2 and "already" in result.stderr
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_diff_as_text(pax_here: Pax) -> None:
    lines = pax_here("recipes", "diff", "tiny", "tiny-synthetic").stdout.splitlines()
    assert 'train_input: "StdlibInput" -> "SyntheticInput"' in lines
    assert not [line for line in lines if line.startswith("task.model")]


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "paxcli", "recipes", "show", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
