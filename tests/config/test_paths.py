"""Replacement of a file: the old text or the new one, whenever it is interrupted."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import threading

import pytest

from paxcli.config.paths import replace_bytes, replace_text, write_output
from paxcli.errors import MissingError


@pytest.mark.parametrize("interrupted", ["fsync", "rename"])
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


def test_a_write_that_fails_changes_nothing_and_names_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plot.png"
    replace_bytes(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file may be larger
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            replace_bytes(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"plot.png": b"old"}


def test_a_pipe_takes_the_content_and_stays_one(tmp_path: pathlib.Path) -> None:
    """So does a device: root's `--out /dev/null` must not replace it."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    replace_bytes(pipe, b"text")
    reader.join(10)
    assert read == [b"text"] and pipe.is_fifo()


def test_of_a_link_the_file_is_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to("file")
    replace_bytes(tmp_path / "link", b"text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"text"


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: pathlib.Path, mode: int) -> None:
    """One that only its owner may read became readable to all."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(mode)
    replace_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_the_pipe_of_another_process_takes_the_content() -> None:
    """Such as `--out /dev/stdout`, a link whose target has no path."""
    reader, writer = os.pipe()
    replace_bytes(f"/proc/self/fd/{writer}", b"text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    os.close(writer)


def test_an_output_gets_its_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_output("~/new/out.yaml", b"text")
    assert (tmp_path / "new/out.yaml").read_bytes() == b"text"


@pytest.mark.parametrize(
    "number,problem", [(errno.ENOSPC, "no space left on the device"), (errno.ENAMETOOLONG, "File name too long")]
)
def test_an_output_that_cannot_be_written_is_unchanged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "out.yaml").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MissingError) as caught:
        write_output(tmp_path / "out.yaml", b"new")
    assert caught.value.message == f"Cannot write {tmp_path}/out.yaml: {problem}."
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"out.yaml": b"old"}
