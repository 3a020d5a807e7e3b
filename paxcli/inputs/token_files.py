"""Token files: the ids of documents end to end, each closed by an end-of-document id, to be memory-mapped.

`NAME.bin` holds the ids and nothing else, little-endian. `NAME.bin.json` beside it says what they are; of a file that
something else wrote, `{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}` is enough. `NAME.bin.index` tells
where documents start (`PackedTokens.starts`, int64); without it, they are looked for when the file is opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
from etils import epath

from paxcli.errors import DataError
from paxcli.inputs.files import local_copy
from paxcli.inputs.tokenizers import Tokenizer

_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SIDECAR, _INDEX, _PARTIAL = ".json", ".index", ".tmp"
_CHUNK = 2**24
_EDGE = 2**16


def dtype_for(vocab_size: int) -> np.dtype:
    """The smaller of the two dtypes that holds all ids."""
    return _DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFileInfo:
    """What the ids of a token file are.

    Attributes:
      dtype: `uint16` or `uint32`.
      vocab_size: Ids are below it.
      eos_id: The last token of each document.
      pad_id: An id to stand where there is no token.
      num_documents: How many documents; None: unknown.
      num_tokens: How many ids, the last of each document counted; None: unknown.
      bad_records: What was left out of the text, and why.
      made_from: What the file was made from and how; None: unknown.
    """

    dtype: str
    vocab_size: int
    eos_id: int
    pad_id: int = 0
    num_documents: int | None = None
    num_tokens: int | None = None
    bad_records: list[str] = dataclasses.field(default_factory=list)
    made_from: dict[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, **fields: Any) -> Self:
        """For what a tokenizer makes."""
        size = tokenizer.vocab_size
        name = dtype_for(size).name
        return cls(dtype=name, vocab_size=size, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, **fields)


def read_info(path: epath.Path) -> TokenFileInfo:
    """What the file beside `path` says.

    Raises:
      DataError: There is none, or it says nothing sensible.
    """
    sidecar = _beside(path, _SIDECAR)
    example = '{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}'
    hint = f"`pax data tokenize` writes it; for ids from elsewhere, write one such as {example}."
    if not sidecar.exists():
        raise DataError(f"There is no {sidecar} that says what the ids of {path} are.", hint)
    try:
        fields = json.loads(sidecar.read_text())
        known = {field.name for field in dataclasses.fields(TokenFileInfo)}
        info = TokenFileInfo(**{name: value for name, value in fields.items() if name in known})
        if info.dtype not in _DTYPES:
            raise ValueError(f"dtype is {info.dtype!r}, not uint16 or uint32")
        if not 0 <= info.eos_id < info.vocab_size <= 2 ** (8 * _DTYPES[info.dtype].itemsize):
            raise ValueError(f"eos_id {info.eos_id}, vocab_size {info.vocab_size} and {info.dtype} do not fit together")
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{sidecar} does not describe a token file: {error}.", hint) from None
    return info


def open_token_file(path: epath.Path, info: TokenFileInfo, cache_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The memory-mapped ids [N], and where documents start (`PackedTokens.starts`).

    Raises:
      DataError: The file has not the size that its `.json` says, or is no sequence of its dtype.
    """
    local, dtype = local_copy(path, cache_dir), _DTYPES[info.dtype]
    try:
        size = local.stat().st_size
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from None
    if size % dtype.itemsize or (info.num_tokens is not None and size != info.num_tokens * dtype.itemsize):
        wanted = "a whole number" if info.num_tokens is None else info.num_tokens
        raise DataError(f"{path} has {size} bytes, which is not {wanted} of {info.dtype}.", "Write or fetch it again.")
    tokens = _mapped(local, dtype)
    index = _beside(path, _INDEX)
    if info.num_documents is None or not index.exists():
        return tokens, _find_starts(tokens, info.eos_id)
    starts = _mapped(local_copy(index, cache_dir), np.dtype("<i8"))
    if len(starts) != info.num_documents + 1 or starts[-1] != len(tokens) - info.num_documents:
        raise DataError(f"{index} is not the index of {path}.", "Remove it, or write both again.")
    return tokens, starts


def file_checksum(path: epath.Path, cache_dir: str | None) -> int:
    """A checksum of a file's size, beginning and end: other data has another, and no file is read whole."""
    local = local_copy(path, cache_dir)
    size = local.stat().st_size
    with local.open("rb") as file:
        total = zlib.crc32(file.read(_EDGE), size & 0xFFFFFFFF)
        file.seek(max(size - _EDGE, 0))
        return zlib.crc32(file.read(_EDGE), total)


def write_token_file(path: epath.Path, documents: Iterable[np.ndarray], info: TokenFileInfo, bad: list[str]) -> int:
    """Writes documents, each with its last token, and returns how many ids.

    Args:
      path: `NAME.bin`. What describes it is written last, so that a file that has it is whole.
      documents: Ids of each document.
      info: What they are; counts are filled in.
      bad: What was left out, once all documents are taken.
    """
    dtype, starts, num_tokens = _DTYPES[info.dtype], [0], 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, _PARTIAL)
    with partial.open("wb") as file:
        for ids in documents:
            file.write(ids.astype(dtype, copy=False).tobytes())
            num_tokens += len(ids)
            starts.append(starts[-1] + len(ids) - 1)
    partial.replace(path)
    _beside(path, _INDEX).write_bytes(np.array(starts, "<i8").tobytes())
    info = dataclasses.replace(info, num_documents=len(starts) - 1, num_tokens=num_tokens, bad_records=bad)
    _beside(path, _PARTIAL).write_text(json.dumps(dataclasses.asdict(info), indent=1))
    _beside(path, _PARTIAL).replace(_beside(path, _SIDECAR))
    return num_tokens


def _beside(path: epath.Path, suffix: str) -> epath.Path:
    return path.with_name(path.name + suffix)


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    if os.path.getsize(path) == 0:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


def _find_starts(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Documents end at each `eos_id`; what stands after the last is one more, cut off before its end."""
    chunks = (np.flatnonzero(tokens[at : at + _CHUNK] == eos_id) + at for at in range(0, len(tokens), _CHUNK))
    ends = np.concatenate([np.zeros(0, np.int64), *chunks]) + 1
    if len(tokens) and (not len(ends) or ends[-1] != len(tokens)):
        ends = np.append(ends, len(tokens))
    return np.concatenate([np.zeros(1, np.int64), ends - np.arange(1, len(ends) + 1)])
