"""Replacement of a file: the old text or the new one, whenever it is interrupted."""

from __future__ import annotations

import os
import pathlib

import pytest

from paxcli.config.paths import replace_text


@pytest.mark.parametrize("interrupted", ["fsync", "replace"])
def test_an_interrupted_replacement_leaves_the_old_text(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    path = tmp_path / "config.txt"
    replace_text(path, "old\n")
    monkeypatch.setattr(os, interrupted, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_text(path, "new\n")
    assert path.read_text() == "old\n"


def test_data_and_directory_are_synced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.path.realpath(f"/proc/self/fd/{fd}")))
    replace_text(tmp_path / "a", "é")
    assert synced == [str(tmp_path / "a.tmp"), str(tmp_path)]
    assert (tmp_path / "a").read_bytes() == "é".encode()
