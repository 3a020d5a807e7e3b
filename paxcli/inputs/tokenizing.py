"""Text into ids: a document after the other in this process, or parts of the files in several."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple, TypeVar

import numpy as np
from etils import epath

from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.inputs.documents import BadRecords, Reading
from paxcli.inputs.files import SourceFile
from paxcli.inputs.token_files import TokenFileInfo, dtype_for, read_info, write_token_file
from paxcli.inputs.tokenizers import Tokenizer

BYTES_PER_PART = 2**26
T = TypeVar("T")
R = TypeVar("R")


def tokenized(
    files: Sequence[SourceFile], reading: Reading, tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[np.ndarray]:
    """The ids of each document: `bos` where there is one, its text, `eos`. Empty ones are no documents."""
    dtype = dtype_for(tokenizer.vocab_size)
    first = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
    last = np.array([tokenizer.eos_id], dtype)
    for file in files:
        for text in reading.documents(file, bad):
            if text:
                yield np.concatenate([first, tokenizer.encode(text).astype(dtype, copy=False), last])


class Part(NamedTuple):
    """A token file to be, and the files whose text goes into it."""

    path: epath.Path
    files: tuple[SourceFile, ...]
    num_bytes: int


def plan_parts(files: Sequence[SourceFile], directory: epath.Path, bytes_per_part: int = BYTES_PER_PART) -> list[Part]:
    """Files in their order, so many to a part that each has about as many bytes; a file is never cut."""
    groups: list[list[tuple[SourceFile, int]]] = []
    room = 0
    for file in files:
        size = file.path.stat().length
        if room < size or not groups:
            groups.append([])
            room = bytes_per_part
        groups[-1].append((file, size))
        room -= size
    return [
        Part(directory / f"part-{i:05}.bin", tuple(file for file, _ in group), sum(size for _, size in group))
        for i, group in enumerate(groups)
    ]


@dataclasses.dataclass(frozen=True)
class Tokenizing:
    """How parts are written.

    Attributes:
      reading: How files become documents.
      tokenizer: Template of the tokenizer, for each process to make its own.
    """

    reading: Reading
    tokenizer: Callable[[], Tokenizer]

    def write(self, part: Part) -> TokenFileInfo:
        """Writes one part, and returns what is in it."""
        tokenizer = self.tokenizer()
        info = TokenFileInfo.of(tokenizer, made_from=self._made_from(part))
        bad = BadRecords(self.reading.policy, self.reading.budget)
        write_token_file(part.path, tokenized(part.files, self.reading, tokenizer, bad), info, bad.found)
        return read_info(part.path)

    def written_of(self, parts: Sequence[Part]) -> dict[Part, TokenFileInfo]:
        """Those of the parts that an earlier run wrote.

        Raises:
          ConfigError: Their directory holds parts that were made from other files, or otherwise.
        """
        directory, names = parts[0].path.parent, {part.path.name for part in parts}
        for path in sorted(directory.glob("part-*.bin.json")) if directory.exists() else []:
            if path.name.removesuffix(".json") not in names:
                raise ConfigError(f"{path} is of an earlier run with other files.", _ELSEWHERE)
        return {part: info for part in parts if (info := self._written(part)) is not None}

    def _written(self, part: Part) -> TokenFileInfo | None:
        if not part.path.with_name(part.path.name + ".json").exists():
            return None
        info, wanted = read_info(part.path), self._made_from(part)
        for name in wanted:
            if (info.made_from or {}).get(name) != wanted[name]:
                raise ConfigError(
                    f"{part.path} is of an earlier run with another value of `{name}`.",
                    _ELSEWHERE,
                )
        return info

    def _made_from(self, part: Part) -> dict[str, object]:
        return {
            "files": [[file.name, file.path.stat().length] for file in part.files],
            "tokenizer": repr(self.tokenizer()),
            "format": self.reading.format,
            "text_field": self.reading.text_field,
        }

    def write_all(
        self, parts: Sequence[Part], num_workers: int, done: Iterable[TokenFileInfo] = ()
    ) -> Iterator[tuple[Part, TokenFileInfo]]:
        """Writes the parts, here or in so many processes, and yields each when it is whole, in any order.

        Raises:
          MissingError: A process was killed, most often for want of memory.
          DataError: A file cannot be read, or parts left out more records than the budget.
        """
        left_out = sum(len(info.bad_records) for info in done)
        written = in_processes(self.write, parts, num_workers) if num_workers else ((p, self.write(p)) for p in parts)
        for part, info in written:
            yield part, info
            left_out += len(info.bad_records)
            if self.reading.policy == "skip" and left_out > self.reading.budget:
                raise DataError(
                    f"More than {self.reading.budget} records cannot be read. The last one: {info.bad_records[-1]}",
                    "Mend the data, or raise bad_record_budget.",
                )


_ELSEWHERE = "Choose another directory, or remove that one."


def in_processes(call: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[T, R]]:
    """Yields each item with what `call` returns of it, computed in so many processes, in any order.

    Raises:
      MissingError: A process was killed, most often for want of memory.
    """
    # JAX and TensorFlow run threads, so processes are started afresh and not forked.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(num_workers, context, initializer=_leave_ctrl_c_to_parent)
    try:
        running = {pool.submit(call, item): item for item in items}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()
    except BrokenProcessPool:
        raise MissingError(
            "A process that tokenizes was killed.", "There may be too little memory: use fewer workers."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
