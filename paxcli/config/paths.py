"""Paths of files on this machine and in buckets."""

from __future__ import annotations

import os
from pathlib import Path


def resolve_path(target: str | os.PathLike[str]) -> Path:
    """The absolute path of a local file, or the path of a file in a bucket (`gs://…`)."""
    if "://" not in os.fspath(target):
        return Path(target).expanduser().resolve()
    from etils import epath

    return epath.Path(target)  # pyrefly: ignore[bad-return] - it has the methods of a Path
