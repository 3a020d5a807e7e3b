"""Tokenizes files, in this process or in parallel processes that write token files."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from paxcli.errors import ConfigError
from paxcli.inputs.documents import BadRecords, Reading, format_of
from paxcli.inputs.files import SourceFile, size_of
from paxcli.inputs.processes import map_in_processes
from paxcli.inputs.token_files import TokenFileInfo, dtype_for, edges_checksum, read_info, write_token_file
from paxcli.inputs.tokenizers import Tokenizer, TokenizerTemplate

BYTES_PER_PART = 2**26
_BATCH_CHARACTERS = 2**20  # texts that are encoded at once; their encodings take some 40 MiB


class Part(NamedTuple):
    """A token file to write, and its source files."""

    path: epath.Path
    files: tuple[SourceFile, ...]
    num_bytes: int


def plan_parts(files: Sequence[SourceFile], directory: epath.Path, bytes_per_part: int = BYTES_PER_PART) -> list[Part]:
    """Groups files, in order, into parts of about `bytes_per_part` bytes; never splits a file."""
    groups: list[list[SourceFile]] = []
    sizes: list[int] = []  # of the groups
    for file in files:
        size = size_of(file.path)
        if not groups or sizes[-1] + size > bytes_per_part:
            groups.append([])
            sizes.append(0)
        groups[-1].append(file)
        sizes[-1] += size
    paths = (directory / f"part-{index:05}.bin" for index in range(len(groups)))
    return list(map(Part, paths, map(tuple, groups), sizes))


@dataclasses.dataclass(frozen=True)
class Tokenizing:
    """Tokenizes the files of a data set, and writes parts of it as token files.

    Attributes:
      reading: Reads documents from files.
      tokenizer: Template of the tokenizer; each process builds its own.
    """

    reading: Reading
    tokenizer: TokenizerTemplate

    def tokenize(self, files: Iterable[SourceFile], tokenizer: Tokenizer, bad: BadRecords) -> Iterator[np.ndarray]:
        """The ids of each document: `bos` if the tokenizer has one, the text, `eos`. Skips empty documents."""
        dtype = dtype_for(tokenizer.vocab_size)
        first = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
        last = np.array([tokenizer.eos_id], dtype)
        for batch in _batches(text for file in files for text in self.reading.documents(file, bad) if text):
            for ids in tokenizer.encode_batch(batch):
                yield np.concatenate([first, ids.astype(dtype, copy=False), last])

    def write(self, part: Part) -> TokenFileInfo:
        """Writes one part, and returns its description."""
        tokenizer = self.tokenizer()
        info = TokenFileInfo.of(tokenizer, made_from=self._provenance(part))
        bad = BadRecords(self.reading.on_bad_record, self.reading.bad_record_budget)
        write_token_file(part.path, self.tokenize(part.files, tokenizer, bad), info, bad.found)
        return read_info(part.path)

    def find_written_parts(self, parts: Sequence[Part]) -> dict[Part, TokenFileInfo]:
        """The parts that an earlier run has already written.

        Raises:
          ConfigError: The directory has parts of other files or options.
        """
        directory = parts[0].path.parent
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        found = {name.removesuffix(".json") for name in fnmatch.filter(names, "part-*.bin.json")}
        if others := sorted(found - {part.path.name for part in parts}):
            raise ConfigError(f"{directory / others[0]}.json is from an earlier run with other files.", _DIRECTORY_HINT)
        existing = [(part, self._read_existing(part)) for part in parts if part.path.name in found]
        # One whose ids were deleted or truncated since is written again.
        return {part: info for part, info in existing if part.path.exists() and size_of(part.path) == _size(info)}

    def _read_existing(self, part: Part) -> TokenFileInfo:
        info = read_info(part.path)
        for name, value in self._provenance(part).items():
            if (info.made_from or {}).get(name) != value:
                raise ConfigError(f"{part.path} is from a run with another value of `{name}`.", _DIRECTORY_HINT)
        return info

    def _provenance(self, part: Part) -> dict[str, object]:
        tokenizer = self.tokenizer()
        return {
            "files": [[file.name, edges_checksum(file.path)] for file in part.files],
            "tokenizer": repr(tokenizer),
            "tokenizer_checksum": tokenizer.path and edges_checksum(epath.Path(tokenizer.path).expanduser()),
            "format": sorted({self.reading.format or format_of(file.name) for file in part.files}),
            "text_field": self.reading.text_field,
        }

    def write_all(
        self, parts: Sequence[Part], num_workers: int, done: Iterable[TokenFileInfo] = ()
    ) -> Iterator[tuple[Part, TokenFileInfo]]:
        """Writes the parts in `num_workers` processes (0: in this one), and yields each as it completes, in any order.

        Raises:
          MissingError: A process was killed, usually because memory ran out.
          DataError: A file cannot be read, or the parts skipped more records than the budget.
        """
        bad = BadRecords(self.reading.on_bad_record, self.reading.bad_record_budget)
        bad.found += [record for info in done for record in info.bad_records]
        for part, info in map_in_processes(self.write, parts, num_workers):
            yield part, info
            if self.reading.on_bad_record == "skip":
                bad.add_skipped(info.bad_records)


_DIRECTORY_HINT = "Choose another directory, or delete this one."


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, in order, of about `_BATCH_CHARACTERS` characters each."""
    batch, num_characters = [], 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def _size(info: TokenFileInfo) -> int:
    return (info.num_tokens or 0) * dtype_for(info.vocab_size).itemsize
