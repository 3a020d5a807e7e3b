"""Token files: memory-mapped ids of concatenated documents, each with an end-of-document id.

`NAME.bin` contains only the ids, little-endian. `NAME.bin.json` describes them; for a file from another program,
`{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}` is enough. `NAME.bin.index` has the starts of documents
(`PackedTokens.starts`, int64); without it, they are computed when the file is opened. The description has checksums
(CRC-32) of both: that of the index is checked when a file is opened, and that of the ids by `check_contents`.
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

from paxcli.config.paths import replace_text, replacement
from paxcli.errors import DataError
from paxcli.inputs.files import local_copy, size_of
from paxcli.inputs.tokenizers import Tokenizer

_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SIDECAR, _INDEX = ".json", ".index"
_CHUNK = 2**24
_EDGE = 2**16


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype of token files for this vocabulary size: uint16 if it fits, otherwise uint32."""
    return _DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFileInfo:
    """The description of a token file.

    Attributes:
      dtype: `uint16` or `uint32`.
      vocab_size: All ids are smaller.
      eos_id: The last token of each document.
      pad_id: Id for padding.
      num_documents: Number of documents; None: unknown.
      num_tokens: Number of ids, including each document's last one; None: unknown.
      bad_records: The error of each skipped record.
      checksum: CRC-32 of the ids; None: unknown.
      index_checksum: CRC-32 of the index; None: unknown.
      made_from: The source files and the options of tokenization; None: unknown.
    """

    dtype: str
    vocab_size: int
    eos_id: int
    pad_id: int = 0
    num_documents: int | None = None
    num_tokens: int | None = None
    bad_records: list[str] = dataclasses.field(default_factory=list)
    checksum: int | None = None
    index_checksum: int | None = None
    made_from: dict[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, **fields: Any) -> Self:
        """The description of a file written with this tokenizer."""
        ids = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
        return cls(dtype=dtype_for(tokenizer.vocab_size).name, **ids, **fields)


def read_info(path: epath.Path) -> TokenFileInfo:
    """Reads the description of a token file, `NAME.bin.json`.

    Raises:
      DataError: The description does not exist, or is invalid.
    """
    sidecar = _sibling(path, _SIDECAR)
    example = '{"dtype": "uint16", "vocab_size": 50257, "eos_id": 50256}'
    hint = f"`pax data tokenize` writes it; for a file from another program, write one such as {example}."
    if not sidecar.exists():
        raise DataError(f"{path} has no description: there is no {sidecar}.", hint)
    try:
        fields = json.loads(sidecar.read_text())
        names = {field.name for field in dataclasses.fields(TokenFileInfo)}
        info = TokenFileInfo(**{name: value for name, value in fields.items() if name in names})
        if info.dtype not in _DTYPES:
            raise ValueError(f"dtype is {info.dtype!r}, not uint16 or uint32")
        if not 0 <= info.eos_id < info.vocab_size <= 2 ** (8 * _DTYPES[info.dtype].itemsize):
            raise ValueError(f"eos_id {info.eos_id}, vocab_size {info.vocab_size} and {info.dtype} are inconsistent")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{sidecar} does not describe a token file: {error}.", hint) from None
    return info


def open_token_file(path: epath.Path, info: TokenFileInfo, cache_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Memory-maps a token file: the ids [N], and the starts of documents (`PackedTokens.starts`).

    Raises:
      DataError: The file cannot be read, its size does not match its `.json`, or its index is damaged.
    """
    local, dtype = local_copy(path, cache_dir), _DTYPES[info.dtype]
    try:
        size = local.stat().st_size
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from None
    if size % dtype.itemsize or (info.num_tokens is not None and size != info.num_tokens * dtype.itemsize):
        ids = ("" if info.num_tokens is None else f"{info.num_tokens} ") + f"ids of {dtype.itemsize} bytes"
        raise DataError(f"{path} has {size} bytes; expected {ids} ({info.dtype}).", "Write or download it again.")
    tokens = _memory_map(local, dtype)
    index = _sibling(path, _INDEX)
    if info.num_documents is None or not index.exists():
        return tokens, _find_starts(tokens, info.eos_id)
    copy = local_copy(index, cache_dir)
    starts = _memory_map(copy, np.dtype("<i8")) if copy.stat().st_size == 8 * (info.num_documents + 1) else None
    if starts is None or not _is_index(starts, len(tokens), info):
        raise DataError(f"{index} is not the index of {path}.", "Delete it, or write both again.")
    return tokens, starts


def _is_index(starts: np.ndarray, num_tokens: int, info: TokenFileInfo) -> bool:
    if info.index_checksum is not None:
        return zlib.crc32(starts.data) == info.index_checksum
    return bool(starts[0] == 0 and starts[-1] == num_tokens - len(starts) + 1 and (np.diff(starts) >= 0).all())


def check_contents(path: epath.Path, tokens: np.ndarray, info: TokenFileInfo) -> None:
    """Reads all ids of a token file, and compares them with their vocabulary, and their checksum, if there is one.

    Raises:
      DataError: They were altered since the file was written, or are not of this vocabulary.
    """
    total = 0
    for at in range(0, len(tokens), _CHUNK):
        total = zlib.crc32((chunk := tokens[at : at + _CHUNK]).data, total)
        check_vocabulary(path, chunk, info.vocab_size)
    if total != info.checksum and info.checksum is not None:
        raise DataError(f"{path} is damaged: its ids do not match their checksum.", "Write or download it again.")


def check_vocabulary(path: epath.Path, ids: np.ndarray, vocab_size: int) -> None:
    """Raises DataError for ids of a token file that its vocabulary does not have."""
    if (largest := int(ids.max())) >= vocab_size:
        hint = "Write or download the file again, or correct its .json."
        raise DataError(f"{path} contains id {largest}, but its vocab_size is {vocab_size}.", hint)


def identity(path: epath.Path, info: TokenFileInfo, cache_dir: str | None) -> list[int]:
    """Identifies the contents of a token file.

    Its checksums, or else one of its size and of its first and last 64 KiB, so that a large file is not read in full.
    """
    if info.checksum is not None and info.index_checksum is not None:
        return [info.checksum, info.index_checksum]
    return [edges_checksum(epath.Path(local_copy(path, cache_dir)))]


def edges_checksum(path: epath.Path) -> int:
    """CRC-32 of a file's size and of its first and last 64 KiB."""
    size = size_of(path)
    with path.open("rb") as file:
        total = zlib.crc32(file.read(_EDGE), size & 0xFFFFFFFF)
        file.seek(max(size - _EDGE, 0))
        return zlib.crc32(file.read(_EDGE), total)


def write_token_file(path: epath.Path, documents: Iterable[np.ndarray], info: TokenFileInfo, bad: list[str]) -> None:
    """Writes a token file.

    Args:
      path: `NAME.bin`. Its description is written last, so a file with a description is complete.
      documents: Ids of each document, including its last token.
      info: The description, without counts.
      bad: The errors of skipped records, complete once all documents are read.
    """
    dtype = _DTYPES[info.dtype]
    starts, checksum = [0], 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as partial, partial.open("wb") as file:
        for ids in documents:
            content = ids.astype(dtype, copy=False).tobytes()
            file.write(content)
            checksum = zlib.crc32(content, checksum)
            starts.append(starts[-1] + len(ids) - 1)
    index = np.array(starts, "<i8").tobytes()
    _sibling(path, _INDEX).write_bytes(index)
    # Each document has one token without a label.
    counts = {"num_documents": len(starts) - 1, "num_tokens": starts[-1] + len(starts) - 1}
    info = dataclasses.replace(info, **counts, bad_records=bad, checksum=checksum, index_checksum=zlib.crc32(index))
    replace_text(_sibling(path, _SIDECAR), json.dumps(dataclasses.asdict(info), indent=1))


def _sibling(path: epath.Path, suffix: str) -> epath.Path:
    return path.with_name(path.name + suffix)


def _memory_map(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype, "r")) if os.path.getsize(path) else np.zeros(0, dtype)


def _find_starts(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """The starts of documents, which end at each `eos_id`. Tokens after the last `eos_id` are another document."""
    chunks = (np.flatnonzero(tokens[at : at + _CHUNK] == eos_id) + at for at in range(0, len(tokens), _CHUNK))
    ends = np.concatenate([np.zeros(0, np.int64), *chunks]) + 1
    if len(tokens) and (not len(ends) or ends[-1] != len(tokens)):
        ends = np.append(ends, len(tokens))
    return np.concatenate([np.zeros(1, np.int64), ends - np.arange(1, len(ends) + 1)])
