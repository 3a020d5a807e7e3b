"""Finds the files of an input from paths and globs, local, in a bucket or on the Hugging Face Hub."""

from __future__ import annotations

import functools
import glob
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from etils import epath

from paxcli.config.bucket import is_transient
from paxcli.config.paths import copy_file, size_and_time
from paxcli.errors import DataError, MissingError, RemoteError, first_line

_WILDCARDS = "*?["
_CLIENTS = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
_HUB_HINT = "Write hf://datasets/ORGANIZATION/NAME/FILE. For a private dataset, log in: `hf auth login`."
_PATH_HINT = "Check the path, and that you may read its directory. Recipes have it in the field `files` of an input."


class SourceFile(NamedTuple):
    """A file, and its name relative to the data's directory, which does not change when the data is moved."""

    name: str
    path: epath.Path
    by_wildcard: bool = True


def find_files(patterns: Iterable[str]) -> list[SourceFile]:
    """The files matched by paths and globs, sorted by name, without duplicates.

    Raises:
      DataError: A path does not exist, a glob has no match, or a bucket or the hub cannot be listed.
      MissingError: A package is not installed.
      RemoteError: A bucket or the hub cannot be reached.
    """
    found: dict[str, SourceFile] = {}
    for pattern in patterns:
        for file in _find_remote(pattern) if "://" in pattern else _find_local(pattern):
            found.setdefault(os.fspath(file.path), file)
    return sorted(found.values())


def _find_local(pattern: str) -> list[SourceFile]:
    path = os.path.expanduser(pattern)
    if not glob.has_magic(path) or os.path.exists(path):
        return _one_file(pattern, epath.Path(os.path.abspath(path)))
    # Absolute only after the search: the working directory may have wildcards in its name.
    root = os.path.abspath(_split_at_wildcard(path)[0] or (os.sep if os.path.isabs(path) else os.curdir))
    matches = map(os.path.abspath, glob.glob(path, recursive=True))
    return _files_below(pattern, epath.Path(root), map(epath.Path, matches))


def _find_remote(pattern: str) -> list[SourceFile]:
    scheme = pattern.partition("://")[0]
    try:
        if not glob.has_magic(pattern):
            return _one_file(pattern, epath.Path(pattern))
        fixed, rest = _split_at_wildcard(pattern)
        return _files_below(pattern, epath.Path(fixed), epath.Path(fixed).glob(rest))
    except ImportError as error:
        raise MissingError(f"Reading {pattern} needs a package: {error}.", f"pip install {_CLIENTS[scheme]}") from None
    except DataError:
        raise
    except Exception as error:  # each file system raises its own types
        hint = _HUB_HINT if scheme == "hf" else "Check the bucket's name and your permissions."
        kind = RemoteError if is_transient(error) else DataError
        raise kind(f"Cannot list {pattern}: {first_line(error).rstrip('.')}.", hint) from error


def _one_file(pattern: str, path: epath.Path) -> list[SourceFile]:
    if not path.exists():
        raise DataError(f"There is no file {pattern}.", _PATH_HINT)
    return [SourceFile(path.name, path, by_wildcard=False)]


def _files_below(pattern: str, root: epath.Path, matches: Iterable[epath.Path]) -> list[SourceFile]:
    if files := [SourceFile(match.relative_to(root).as_posix(), match) for match in matches if not match.is_dir()]:
        return files
    raise DataError(f"No file matches {pattern}.", _PATH_HINT)


def _split_at_wildcard(path: str) -> tuple[str, str]:
    """Splits a pattern into the directory above the first component with a wildcard, and the rest."""
    head, _, first = path[: min(path.find(c) for c in _WILDCARDS if c in path)].rpartition("/")
    return head, first + path[len(head) + 1 + len(first) :]


def size_of(path: epath.Path) -> int:
    """A file's size in bytes."""
    return size_and_time(path)[0]


def local_copy(path: epath.Path, cache_dir: str | None) -> Path:
    """Returns `path`, or a local copy of a bucket's file in `cache_dir` (None: a temporary directory).

    For files that need random access, which is too slow on a bucket. An existing copy of the same size is reused.
    """
    address = os.fspath(path)
    if "://" not in address:
        return Path(address)
    copy = Path(cache_dir or _temporary_directory().name).expanduser() / address.partition("://")[2]
    if not copy.exists() or copy.stat().st_size != path.stat().length:
        copy_file(path, copy)
    return copy


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Deleted when this process ends."""
    return tempfile.TemporaryDirectory(prefix="pax-", ignore_cleanup_errors=True)
