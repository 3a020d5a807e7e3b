"""All documents of an input, packed: of text, tokenized once, or of token files, memory-mapped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import resource
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from etils import epath

from paxcli.errors import DataError, MissingError
from paxcli.inputs.documents import ARRAY_RECORD, PARQUET, BadRecords, format_of
from paxcli.inputs.files import SourceFile
from paxcli.inputs.packing import PackedTokens
from paxcli.inputs.token_files import TokenFileInfo, dtype_for, file_checksum, open_token_file, read_info
from paxcli.inputs.tokenizers import Tokenizer
from paxcli.inputs.tokenizing import Tokenizing, plan_parts, tokenized
from paxcli.nested_map import NestedMap

_SPARE_FILES = 256


@dataclasses.dataclass(frozen=True)
class Packing:
    """How documents become rows: see `PackedTokens`; longer ones than `drop_longer_than` tokens are left out."""

    seq_len: int
    packing: str
    drop_longer_than: int | None

    def pack(self, tokens: np.ndarray, starts: np.ndarray, pad_id: int) -> tuple[PackedTokens, int]:
        """The packed documents, and how many were left out."""
        packed = PackedTokens(tokens=tokens, starts=starts, seq_len=self.seq_len, pad_id=pad_id, packing=self.packing)
        if self.drop_longer_than is None:
            return packed, 0
        kept = packed.without_longer(self.drop_longer_than)
        return kept, packed.num_documents - kept.num_documents


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Rows of one or more packs, one after the other.

    Attributes:
      packs: The packs.
      bad_records: What was left out because it cannot be read, and where.
      num_dropped: Documents left out because they are too long.
      num_truncated: Documents that lost their end because they are too long.
      paths: The token file of each pack; empty where ids were checked when they were made.
      vocab_size: Ids are below it.
      checksum: Differs when rows differ.
    """

    packs: Sequence[PackedTokens]
    bad_records: Sequence[str]
    num_dropped: int
    paths: Sequence[epath.Path]
    vocab_size: int
    checksum: int
    num_truncated: int = 0

    @functools.cached_property
    def first_rows(self) -> np.ndarray:
        """The number of the first row of each pack, and of all rows."""
        return np.cumsum([0, *(pack.num_rows for pack in self.packs)], dtype=np.int64)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        """The language-model batch of these rows, every field [B, T]; -1 is a row of padding."""
        packs = np.searchsorted(self.first_rows, np.maximum(numbers, 0), side="right") - 1
        if (packs == packs[0]).all():
            return self._rows_of(packs[0], numbers)
        mine = {pack: np.flatnonzero(packs == pack) for pack in np.unique(packs).tolist()}
        parts = [self._rows_of(pack, numbers[of_pack]) for pack, of_pack in mine.items()]
        back = np.argsort(np.concatenate(list(mine.values())))
        return NestedMap({name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]})

    def _rows_of(self, pack: int, numbers: np.ndarray) -> NestedMap:
        batch = self.packs[pack].rows(np.where(numbers < 0, -1, numbers - self.first_rows[pack]))
        if self.paths and (largest := int(max(batch.ids.max(), batch.labels.max()))) >= self.vocab_size:
            raise DataError(
                f"{self.paths[pack]} holds id {largest}, but its vocab_size is {self.vocab_size}.",
                "Write or fetch the file again, or correct its .json.",
            )
        return batch


def tokenize_text(
    files: Sequence[SourceFile],
    how: Tokenizing,
    tokenizer: Tokenizer,
    packing: Packing,
    num_workers: int,
) -> Corpus:
    """Reads and tokenizes files of text.

    Raises:
      DataError: A file that cannot be read, or more bad records than the budget.
    """
    bad = BadRecords(how.reading.policy, how.reading.budget)
    dtype = dtype_for(tokenizer.vocab_size)
    on_disk = any((how.reading.format or format_of(file.name)) in (ARRAY_RECORD, PARQUET) for file in files)
    with contextlib.ExitStack() as stack:
        documents: Iterable[tuple[np.ndarray, np.ndarray]]
        if num_workers:
            directory = epath.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pax-tokens-")))
            parts = plan_parts(files, directory)
            infos = dict(how.write_all(parts, num_workers))
            bad.found += [record for part in parts for record in infos[part].bad_records]
            documents = (open_token_file(part.path, infos[part], None) for part in parts)
        else:
            start = np.zeros(1, np.int64)
            documents = ((ids, np.append(start, len(ids) - 1)) for ids in tokenized(files, how.reading, tokenizer, bad))
        tokens, starts = _collected(documents, dtype, on_disk)
    pack, num_dropped = packing.pack(tokens, starts, tokenizer.pad_id)
    return Corpus([pack], bad.found, num_dropped, [], tokenizer.vocab_size, pack.checksum)


def _collected(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], dtype: np.dtype, on_disk: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of documents end to end, and where they start; the tokens in memory or in a file that has no name."""
    starts, held = array("q", [0]), []
    with tempfile.TemporaryFile() if on_disk else contextlib.nullcontext() as file:
        for tokens, inner in documents:
            held.append(tokens) if file is None else file.write(np.ascontiguousarray(tokens, dtype).data)
            starts.extend((inner[1:] + starts[-1]).tolist())
        if file is None:
            tokens = np.concatenate(held) if held else np.zeros(0, dtype)
        else:
            file.flush()
            tokens = np.asarray(np.memmap(file, dtype, "r")) if file.tell() else np.zeros(0, dtype)
    return tokens, np.frombuffer(starts, np.int64)


def open_token_files(
    files: Sequence[SourceFile], info: TokenFileInfo, packing: Packing, cache_dir: str | None
) -> Corpus:
    """Maps token files into memory; `info` is what the first one says.

    Raises:
      DataError: A file that is damaged, or made with another vocabulary than the first.
      MissingError: More files than this process may open.
    """
    _allow_open_files(2 * len(files))
    packs, bad, dropped = [], [], 0
    for file in files:
        found = read_info(file.path)
        for name in ("vocab_size", "eos_id"):
            if getattr(found, name) != getattr(info, name):
                raise DataError(
                    f"{file.path} has {name} {getattr(found, name)}, {files[0].path} has {getattr(info, name)}.",
                    "Give files of different tokenizers to different inputs.",
                )
        pack, num_dropped = packing.pack(*open_token_file(file.path, found, cache_dir), info.pad_id)
        packs.append(pack)
        bad += found.bad_records
        dropped += num_dropped
    identity = [
        [pack.num_documents, pack.num_tokens, file_checksum(file.path, cache_dir)]
        for pack, file in zip(packs, files, strict=True)
    ]
    checksum = zlib.crc32(json.dumps([identity, packing.seq_len, packing.packing]).encode())
    return Corpus(packs, bad, dropped, [file.path for file in files], info.vocab_size, checksum)


def _allow_open_files(number: int) -> None:
    """A mapped file counts as open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _SPARE_FILES
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return
    if most != resource.RLIM_INFINITY and wanted > most:
        raise MissingError(
            f"{number} open files are needed, and this machine allows {most}.",
            "Raise it (ulimit -n), or join token files.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
