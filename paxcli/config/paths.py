"""Where files are: on this machine, or in a bucket."""

from __future__ import annotations

import os
from pathlib import Path


def located(target: str | os.PathLike[str]) -> Path:
    """A path of this machine, made absolute, or one in a bucket (`gs://…`)."""
    if "://" not in os.fspath(target):
        return Path(target).expanduser().resolve()
    from etils import epath

    return epath.Path(target)  # pyrefly: ignore[bad-return] - it has the methods of a Path
