"""Files and directories that commands write: an unusable one is refused before the work."""

from __future__ import annotations

import pathlib

import pytest
from typer.testing import CliRunner

from paxcli.cli.main import app
from paxcli.cli.options import creatable, writable
from paxcli.errors import MissingError


def test_new_and_existing_files_are_taken(tmp_path: pathlib.Path) -> None:
    old = tmp_path / "old.hlo"
    old.write_text("")
    for file in (None, old, tmp_path / "new.hlo", pathlib.Path("/dev/stdout")):
        assert writable(file) == file


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no/x.hlo", "there is no directory .*/no"),
        (".", "it is a directory"),
        ("old/x.hlo", "there is no directory .*/old"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: pathlib.Path, name: str, problem: str) -> None:
    (tmp_path / "old").write_text("")
    with pytest.raises(MissingError, match=f"Cannot write .*: {problem}"):
        writable(tmp_path / name)


@pytest.mark.parametrize(
    "command",
    [
        "compile tiny --topology cpu:1 --hlo",
        "compile tiny --topology cpu:1 --save",
        "inspect-input tiny --save",
        "maxtext-convert --model llama2-7b --out",
        "provision emit tiny --target slurm --accelerator h100:8 --out",
        "recipes cp tiny",
    ],
)
def test_commands_check_their_files_first(command: str) -> None:
    error = CliRunner().invoke(app, [*command.split(), "no/directory/x.py"]).exception
    assert isinstance(error, MissingError) and "there is no directory no/directory" in error.message


def test_new_and_existing_directories_are_taken(tmp_path: pathlib.Path) -> None:
    for directory in (str(tmp_path), str(tmp_path / "new" / "er"), "gs://bucket/new"):
        assert creatable(directory) == directory


@pytest.mark.parametrize("command", ["checkpoints copy run", "data tokenize text.txt", "export run", "import weights"])
@pytest.mark.parametrize(
    ("directory", "problem"),
    [("text.txt", "text.txt is a file"), ("text.txt/x", "is a file"), ("", "its path is empty")],
)
def test_commands_check_their_directories_first(tmp_path, monkeypatch, command, directory, problem) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    error = CliRunner().invoke(app, [*command.split(), "--out", directory]).exception
    assert isinstance(error, MissingError) and problem in error.message
