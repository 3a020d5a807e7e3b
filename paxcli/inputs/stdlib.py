"""A data set that needs no download: the source files of Python's standard library."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from pathlib import Path
from typing import Literal

from etils import epath

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.files import SourceFile
from paxcli.inputs.text import TextInput

_EXCLUDED = {"__pycache__", "dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
_TABLES = {"encodings", "pydoc_data", "entities.py"}  # generated tables


@dataclasses.dataclass(kw_only=True)
class StdlibInput(TextInput):
    """The `.py` files of the running Python's standard library, without tests and generated tables.

    `split=None` means `train` in training and `eval` otherwise. Files that are not UTF-8 are skipped and logged.
    """

    on_bad_record: Literal["error", "skip"] = "skip"

    def _validate_files(self) -> None:
        if self.files is not None:
            raise ConfigError("StdlibInput does not support `files`.", "Leave `files` unset, or use TextInput.")

    def _split_name(self) -> str:
        return self.split or ("train" if self.is_training else "eval")

    def _source_files(self) -> list[SourceFile]:
        root, files = Path(sysconfig.get_path("stdlib")), []
        for directory, children, names in os.walk(root):
            children[:] = [child for child in children if child not in _EXCLUDED | _TABLES]
            paths = [Path(directory, name) for name in names if name.endswith(".py") and name not in _TABLES]
            files += [SourceFile(path.relative_to(root).as_posix(), epath.Path(path)) for path in paths]
        if not files:
            hint = "Use TextInput with your own files."
            raise DataError(f"There are no source files of Python's standard library in {root}.", hint)
        return sorted(files)
