"""The packed documents of an input: text, tokenized once, or memory-mapped token files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import resource
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from etils import epath

from paxcli.errors import DataError, MissingError
from paxcli.inputs import token_files
from paxcli.inputs.documents import BadRecords
from paxcli.inputs.files import SourceFile, size_of
from paxcli.inputs.packing import PackedTokens
from paxcli.inputs.tokenizers import Tokenizer
from paxcli.inputs.tokenizing import Tokenizing, plan_parts
from paxcli.nested_map import NestedMap, join_rows

_SPARE_FILES = 256
_CHECKED_BYTES = 2**32  # the ids of this many bytes of token files, read in a few seconds, are checked at the start


# Packs documents: tokens, starts and the id of padding (see `PackedTokens`), without those that are too long.
Pack = Callable[[np.ndarray, np.ndarray, int], PackedTokens]
# The tokens of one or more documents, and the number of tokens with a label of each document.
_Documents = Iterable[tuple[np.ndarray, Iterable[int]]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The concatenated rows of one or more packs.

    Attributes:
      packs: The packs.
      bad_records: The error of each skipped record.
      num_dropped: Number of documents dropped because they are too long.
      paths: The token file of each pack, whose ids are checked when they are read; empty if they need no check.
      vocab_size: All ids are smaller.
      checksum: Identifies the rows.
      num_truncated: Number of documents truncated because they are too long.
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
        """The number of the first row of each pack, and the total number of rows."""
        return np.cumsum([0, *(pack.num_rows for pack in self.packs)], dtype=np.int64)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        """A language-model batch of these rows, every field [B, T]; -1 is a row of padding."""
        packs = np.searchsorted(self.first_rows, np.maximum(numbers, 0), side="right") - 1
        return join_rows(packs, lambda pack, index: self._read_rows(pack, numbers[index]))

    def _read_rows(self, pack: int, numbers: np.ndarray) -> NestedMap:
        batch = self.packs[pack].rows(np.where(numbers < 0, -1, numbers - self.first_rows[pack]))
        if self.paths:
            token_files.check_vocabulary(self.paths[pack], np.maximum(batch.ids, batch.labels), self.vocab_size)
        return batch


def tokenize_text(
    files: Sequence[SourceFile], tokenizing: Tokenizing, tokenizer: Tokenizer, make_pack: Pack, num_workers: int
) -> Corpus:
    """Reads and tokenizes text files.

    Raises:
      DataError: A file cannot be read, or there are more bad records than the budget.
    """
    bad = BadRecords(tokenizing.reading.on_bad_record, tokenizing.reading.bad_record_budget)
    with contextlib.ExitStack() as stack:
        documents: _Documents
        if num_workers:
            directory = epath.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pax-tokens-")))
            parts = plan_parts(files, directory)
            infos = dict(tokenizing.write_all(parts, num_workers))
            bad.found += [record for part in parts for record in infos[part].bad_records]
            opened = (token_files.open_token_file(part.path, infos[part], None) for part in parts)
            documents = ((tokens, np.diff(starts)) for tokens, starts in opened)
        else:
            documents = ((ids, (len(ids) - 1,)) for ids in tokenizing.tokenize(files, tokenizer, bad))
        tokens, starts = _concatenate(documents, token_files.dtype_for(tokenizer.vocab_size))
    pack = make_pack(tokens, starts, tokenizer.pad_id)
    return Corpus([pack], bad.found, len(starts) - 1 - pack.num_documents, [], tokenizer.vocab_size, pack.checksum)


def _concatenate(documents: _Documents, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated tokens of documents, in a memory-mapped temporary file, and their starts."""
    lengths = array("q")
    with tempfile.TemporaryFile() as file:
        for tokens, of_documents in documents:
            file.write(np.ascontiguousarray(tokens, dtype).data)
            lengths.extend(of_documents)
        file.flush()
        tokens = np.asarray(np.memmap(file, dtype, "r")) if file.tell() else np.zeros(0, dtype)
    return tokens, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def open_token_files(
    files: Sequence[SourceFile], info: token_files.TokenFileInfo, make_pack: Pack, cache_dir: str | None
) -> Corpus:
    """Memory-maps token files; `info` is the first file's. Checks their ids, unless they have more than 4 GiB.

    Raises:
      DataError: A file is damaged, or its vocabulary differs from the first file's.
      MissingError: There are more files than this process may open.
    """
    _allow_open_files(2 * len(files))
    packs, bad, dropped, identities = [], [], 0, []
    is_checked = sum(size_of(file.path) for file in files) <= _CHECKED_BYTES
    for file in files:
        found = token_files.read_info(file.path)
        for name in ("vocab_size", "eos_id"):
            own, first = getattr(found, name), getattr(info, name)
            if own != first:
                hint = "Use a separate input for the files of each tokenizer."
                raise DataError(f"{file.path} has {name} {own}, {files[0].path} has {first}.", hint)
        tokens, starts = token_files.open_token_file(file.path, found, cache_dir)
        if is_checked:
            token_files.check_contents(file.path, tokens, found)
        pack = make_pack(tokens, starts, info.pad_id)
        packs.append(pack)
        bad += found.bad_records
        dropped += len(starts) - 1 - pack.num_documents
        identities.append([pack.num_documents, pack.num_tokens, *token_files.identity(file.path, found, cache_dir)])
    checksum = zlib.crc32(json.dumps([identities, packs[0].seq_len, packs[0].packing]).encode())
    return Corpus(packs, bad, dropped, [] if is_checked else [file.path for file in files], info.vocab_size, checksum)


def _allow_open_files(number: int) -> None:
    """Raises this process's limit of open files, which memory-mapped files count towards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = number + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        hint = "Raise the limit (ulimit -n), or merge token files."
        raise MissingError(f"{number} open files are needed, and this machine allows {hard}.", hint)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
