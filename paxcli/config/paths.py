"""Paths of files on this machine and in buckets, and the atomic replacement of a file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paxcli.config.bucket import repeat


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


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file atomically: after a kill or a power failure it has the old text or the new one, never a part."""
    name = os.fspath(path)
    if "://" in name:
        from etils import epath

        repeat(epath.Path(path).write_text)(text)  # an upload is atomic
        return
    temporary = f"{name}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name)
    sync(os.path.dirname(name) or ".")  # makes the rename durable


def copy_file(source: str | os.PathLike[str], copy: str | os.PathLike[str]) -> None:
    """Copies a file atomically, and makes the directories of the copy. Both may be in buckets."""
    final, is_remote = resolve_path(copy), "://" in os.fspath(copy)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final if is_remote else final.with_name(f"{final.name}.{os.getpid()}.tmp")  # an upload is atomic
    with resolve_path(source).open("rb") as old, partial.open("wb") as new:
        shutil.copyfileobj(old, new, 1 << 22)
    if not is_remote:
        partial.replace(final)


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes a file, or the list of names in a directory, to the disk; does nothing for one in a bucket."""
    if "://" in os.fspath(path):
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def rename_durably(directory: os.PathLike[str], target: os.PathLike[str]) -> None:
    """Renames a directory. After a power failure, `target` has everything or does not exist; not so in a bucket."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in (*files, ""):
            sync(os.path.join(folder, name))
    resolve_path(directory).rename(target)
    sync(os.path.dirname(target))
