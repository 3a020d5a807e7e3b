"""Text that every machine has: the sources of the running Python's standard library."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from pathlib import Path

from etils import epath

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.files import SourceFile
from paxcli.inputs.text import TextInput

_LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
_TABLES = {"encodings", "pydoc_data", "entities.py"}  # generated, and little like Python


@dataclasses.dataclass(kw_only=True)
class StdlibInput(TextInput):
    """The running Python's own `.py` sources, without its tests and generated tables: needs no download.

    `split=None` means `train` in training and `eval` otherwise. The rare source that is not UTF-8 is left out and named
    in the log.
    """

    on_bad_record: str = "skip"

    def _validate_files(self) -> None:
        if self.files is not None:
            raise ConfigError("StdlibInput finds its files itself.", "Leave `files` unset, or use TextInput.")

    def _split_name(self) -> str:
        return self.split or ("train" if self.is_training else "eval")

    def _source_files(self) -> list[SourceFile]:
        root = Path(sysconfig.get_path("stdlib"))
        files = []
        for directory, children, names in os.walk(root):
            children[:] = [child for child in children if child not in _LEFT_OUT | _TABLES]
            paths = [Path(directory, name) for name in names if name.endswith(".py") and name not in _TABLES]
            files += [SourceFile(path.relative_to(root).as_posix(), epath.Path(path)) for path in paths]
        if not files:
            raise DataError(
                f"This Python keeps no sources of its standard library in {root}.", "Use TextInput with files of yours."
            )
        return sorted(files)
