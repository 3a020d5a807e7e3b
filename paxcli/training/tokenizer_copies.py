"""Copies of tokenizer files in the run directory: a run is evaluated and decoded with the tokenizer of its training."""

from __future__ import annotations

import copy
import hashlib
import json

import fiddle as fdl
from etils import epath

from paxcli.config.fields import Mark, marks_of
from paxcli.config.paths import copy_file, replace_text
from paxcli.config.tree import Node, walk
from paxcli.errors import DataError
from paxcli.inputs.files import local_copy
from paxcli.inputs.tokenizer_files import read_object
from paxcli.log import log
from paxcli.training.experiment import Experiment

_RECORD = "tokenizers.json"
_MISSING = hashlib.sha256(b"").hexdigest()
# Chat inputs read them from the tokenizer's directory.
_BESIDE = ("chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja")


def copy_tokenizers(config: fdl.Config[Experiment], run_dir: epath.Path) -> None:
    """Copies the tokenizer files that a recipe names to `tokenizers/SHA-256/` in the run directory.

    Raises:
      DataError: A file is not the one that the run started with.
    """
    check_tokenizers(config, run_dir)
    record = _read_record(run_dir)
    for path, (files, digest) in {node.value: _files(node.value) for node in _nodes(config)}.items():
        if digest == _MISSING:  # that of token files, which need it only to decode ids
            continue
        copied = record.setdefault(path, f"tokenizers/{digest}/{epath.Path(path).name}")
        # A sound copy is left alone: writing it again may fail half-way.
        for file in () if _files(run_dir / copied)[1] == digest else files:
            copy_file(file, (run_dir / copied).parent / file.relative_to(files[0].parent))
    if record:
        replace_text(run_dir / _RECORD, json.dumps(record, indent=1) + "\n")


def check_tokenizers(config: fdl.Config[Experiment], run_dir: epath.Path) -> None:
    """Checks the tokenizer files that a recipe names.

    Raises:
      DataError: A file is not the one that the run started with. A missing file is not an error.
    """
    record = _read_record(run_dir)
    for path in {node.value for node in _nodes(config)} & record.keys():
        copied = run_dir / record[path]
        if _files(path)[1] not in (copied.parent.name, _MISSING):
            hint = f"Restore it from the run's copy: {copied}."
            raise DataError(f"The tokenizer {path} has changed since the run started.", hint)


def copied_folders(config: fdl.Config[Experiment], run_dir: epath.Path) -> list[epath.Path]:
    """The directories of the run's own copies of the tokenizer files that a recipe names."""
    record = _read_record(run_dir)
    return [(run_dir / record[node.value]).parent for node in _nodes(config) if node.value in record]


def with_copied_tokenizers(config: fdl.Config[Experiment], run_dir: epath.Path) -> fdl.Config[Experiment]:
    """A recipe with the run's own copies in place of the tokenizer files that the run was trained with.

    Raises:
      DataError: A copy is missing or damaged.
    """
    record, config = _read_record(run_dir), copy.deepcopy(config)
    for node in (node for node in _nodes(config) if node.value in record):
        own = run_dir / record[node.value]
        files, digest = _files(own)
        if digest != own.parent.name:
            raise DataError(f"The run's tokenizer {own} is missing or damaged.", "Restore it from a backup.")
        if _files(node.value)[1] not in (digest, _MISSING):
            log.warning("The tokenizer %s has changed since the run started: using the run's copy.", node.value)
        local = [local_copy(file, None) for file in files]
        setattr(node.parent, str(node.key), str(local[0]))
    return config


def _nodes(config: fdl.Config[Experiment]) -> list[Node]:
    """The fields of a recipe that name a tokenizer file."""
    return [node for node in walk(config) if Mark.COPIED in marks_of(node.annotation) and node.value]


def _files(tokenizer: epath.PathLike) -> tuple[list[epath.Path], str]:
    """A tokenizer's file and those beside it that belong to it, or nothing; and the SHA-256 of their contents."""
    path = epath.Path(tokenizer).expanduser()
    files = [file for file in (path, *(path.parent / name for name in _BESIDE)) if path.exists() and file.exists()]
    return files, hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def _read_record(run_dir: epath.Path) -> dict[str, str]:
    """Path in the recipe → path of its copy in the run directory."""
    path = run_dir / _RECORD
    return read_object(path) if path.exists() else {}  # pyrefly: ignore - it has the methods of a Path
