"""Files that commands write: an unusable one is refused before the work."""

from __future__ import annotations

import pathlib

import pytest
from typer.testing import CliRunner

from paxcli.cli.main import app
from paxcli.cli.options import writable
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
