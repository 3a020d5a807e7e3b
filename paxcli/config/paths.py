"""Paths of files on this machine and in buckets, and the atomic replacement of a file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paxcli.config.bucket import repeat
from paxcli.errors import DataError, MissingError, PaxError, first_line, machine_fault


def default_run_dir(recipe_name: str) -> str:
    """The run directory of a recipe unless another is given."""
    return f"runs/{recipe_name}"


def resolve_path(target: str | os.PathLike[str]) -> Path:
    """The absolute path of a local file, or the path of a file in a bucket (`gs://…`)."""
    if "://" not in os.fspath(target):
        return Path(target).expanduser().resolve()
    from etils import epath

    return epath.Path(target)  # pyrefly: ignore[bad-return] - it has the methods of a Path


def size_and_time(path: os.PathLike[str]) -> tuple[int, float | None]:
    """A file's size in bytes and time of its last change. epath's `stat` fails where the owner's id has no name."""
    is_remote = "://" in os.fspath(path)
    found = resolve_path(path).stat() if is_remote else os.stat(path)  # a bucket's has other fields
    return (found.length, found.mtime) if is_remote else (found.st_size, found.st_mtime)  # pyrefly: ignore


def read_text(path: Path, kind: type[PaxError] = DataError) -> str:
    """The text of a UTF-8 file that the user named. Raises an error of this `kind` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise kind(f"Cannot read {path}: {error.strerror}.", "Correct the path.") from None
    except UnicodeDecodeError as error:
        raise kind(f"{path} is not UTF-8 text: byte {error.start}.", "Save the file as UTF-8.") from None


def read_json(path: os.PathLike[str]) -> Any:
    """The value in a JSON file. Raises DataError if the file cannot be read or is not JSON."""
    try:
        return json.loads(read_text(resolve_path(path)))
    except (ValueError, RecursionError) as error:  # the second: it is nested too deeply
        raise DataError(f"{path} is not JSON: {error}.", "Correct it or download it again.") from None


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by text in UTF-8, as `replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces a file atomically: after a kill or a power failure it has the old content or the new, never a part.

    An error names the file, which is then unchanged. The permissions of an old file are kept. A device or a pipe is not
    replaced: the content is written to it.
    """
    with replacement(path) as place:
        write = repeat(place.write_bytes) if "://" in os.fspath(path) else place.write_bytes
        write(content)


def write_output(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file that the user named, as `replace_bytes` does, and makes its directory.

    Raises:
      MissingError: The file cannot be written, and is unchanged.
    """
    target = os.path.expanduser(path)
    try:
        resolve_path(target).parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(target, content)
    except OSError as error:
        fault = machine_fault(error) or error.strerror or first_line(error)
        raise MissingError(f"Cannot write {path}: {fault}.", "Choose another file.") from error


def copy_file(source: str | os.PathLike[str], copy: str | os.PathLike[str]) -> None:
    """Copies a file atomically, as `replace_bytes` writes, and makes the directories of the copy."""
    resolve_path(copy).parent.mkdir(parents=True, exist_ok=True)
    own_suffix = f".{os.getpid()}.tmp"  # other processes may copy it too
    with resolve_path(source).open("rb") as old, replacement(copy, own_suffix) as place, place.open("wb") as new:
        shutil.copyfileobj(old, new, 1 << 22)


@contextlib.contextmanager
def replacement(path: str | os.PathLike[str], suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary file with another suffix that replaces `path` at the end, atomically, as `replace_bytes` does.

    Any exception deletes it; an OSError names `path`.
    """
    is_remote, target = "://" in os.fspath(path), os.path.realpath(path)  # that of a link
    if is_remote or (os.path.exists(path) and not os.path.isfile(path)):
        yield resolve_path(path) if is_remote else Path(path)  # an upload is atomic
        return
    temporary = Path(f"{target}{suffix}")
    try:
        yield temporary
        if os.path.exists(target):
            shutil.copymode(target, temporary)
        sync(temporary)
        rename_durably(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = os.fspath(path)
        raise


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes a file, or the list of names in a directory, to the disk; does nothing for one in a bucket."""
    if "://" in os.fspath(path):
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def rename_durably(path: os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a directory, or a file that is on the disk already (`sync`).

    After a power failure, `target` has everything, or is unchanged; not so in a bucket.
    """
    for folder, _, files in os.walk(path, topdown=False):
        for name in (*files, ""):
            sync(os.path.join(folder, name))
    resolve_path(path).rename(target)
    sync(os.path.dirname(target) or ".")  # makes the rename durable
