"""Plain text files, a document each, packed into rows."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paxcli.config.configurable import template
from paxcli.errors import ConfigError, DataError, did_you_mean
from paxcli.inputs.base_input import RandomAccessInput, language_spec
from paxcli.inputs.nested_map import NestedMap
from paxcli.inputs.packing import PackedTokens
from paxcli.inputs.tokenizers import ByteTokenizer, Tokenizer
from paxcli.log import log

_SPLITS = ("train", "eval")
_WILDCARDS = "*?["


class TextFile(NamedTuple):
    """A file, and its name within the data, which does not change when the data moves."""

    name: str
    path: Path
    by_wildcard: bool = True


@dataclasses.dataclass(kw_only=True)
class TextInput(RandomAccessInput):
    """UTF-8 text files as language-model batches: one document per file, packed, nothing dropped.

    Files are read and tokenized once, at the first batch, and stay in memory as ids.

    Args:
      files: Paths and globs (`~` and `**` too). A file matched twice counts once.
      tokenizer: Template of the tokenizer.
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: The model's, which the tokenizer's must fit. None: the trainer sets it.
      shuffle: Whether rows are shuffled, anew in each epoch. None: in training.
      split: `train` or `eval`: only the files that a digest of their name puts there. None: all files.
      eval_fraction: The share of files in `eval`.
    """

    files: list[str] | None = None
    tokenizer: Callable[[], Tokenizer] = template(ByteTokenizer)
    seq_len: int | None = None
    vocab_size: int | None = None
    shuffle: bool | None = None
    split: str | None = None
    eval_fraction: float = 0.03

    def validate(self) -> None:
        super().validate()
        self._validate_files()
        self.tokenizer()  # reads nothing, but refuses to be without a path
        if self.seq_len is None or self.seq_len < 1:
            raise ConfigError(f"Input `{self.name}`: seq_len is {self.seq_len}.", "Set it to 1 or more.")
        if self.split is not None and self.split not in _SPLITS:
            hint = did_you_mean(self.split, _SPLITS) or "Use `train`, `eval` or None."
            raise ConfigError(f"Input `{self.name}`: there is no split `{self.split}`.", hint)
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(f"Input `{self.name}`: eval_fraction is {self.eval_fraction}.", "Set it between 0 and 1.")

    def _validate_files(self) -> None:
        if not self.files or isinstance(self.files, str):
            field = "train_input.files" if self.is_training else "eval_inputs.0.files"
            raise ConfigError(
                f"Input `{self.name}`: files is {self.files!r}.",
                f"Set it to a list, such as --set {field}='[~/text/**/*.txt]', or use `--overlay synthetic-data`.",
            )

    def check_data(self) -> None:
        """Reads and tokenizes all files.

        Raises:
          ConfigError: The tokenizer has ids that the model lacks.
          DataError: A file or glob that gives no text, or bytes that are not UTF-8.
        """
        self.validate()
        self.num_rows()

    def element_spec(self) -> NestedMap:
        return language_spec(self.batch_size, self.seq_len)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        return [self.text_tokenizer.decode(row[:length]) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    def special_tokens(self) -> dict[int, str]:
        tokens = {self.text_tokenizer.pad_id: "<pad>", self.text_tokenizer.eos_id: "<eos>"}
        return tokens if self.text_tokenizer.bos_id is None else tokens | {self.text_tokenizer.bos_id: "<bos>"}

    def num_rows(self) -> int:
        return self._packed.num_rows

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return self._packed.rows(numbers)

    def order(self, positions: np.ndarray) -> np.ndarray:
        shuffles = self.is_training if self.shuffle is None else self.shuffle
        if not shuffles:
            return super().order(positions)
        return np.fromiter((self._shuffled[position] for position in positions.tolist()), np.int64, len(positions))

    def data_fingerprint(self) -> Any:
        return self._packed.checksum

    @functools.cached_property
    def _shuffled(self) -> Any:
        # Rows are in memory, so Grain's part is their order alone: no threads, no prefetch, no copies.
        import grain

        return grain.MapDataset.range(self.num_rows()).shuffle(seed=self.seed).repeat()

    @functools.cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, known to fit the model's vocabulary."""
        tokenizer = self.tokenizer()
        if self.vocab_size is not None and tokenizer.vocab_size > self.vocab_size:
            raise ConfigError(
                f"Input `{self.name}`: the tokenizer has {tokenizer.vocab_size} ids, "
                f"but the model's vocab_size is {self.vocab_size}.",
                f"Set the model's vocab_size to {tokenizer.vocab_size} or more.",
            )
        return tokenizer

    @functools.cached_property
    def _packed(self) -> PackedTokens:
        files = self._split_files()
        tokenizer = self.text_tokenizer
        assert self.seq_len is not None
        packed = PackedTokens.pack(
            self._documents(files), seq_len=self.seq_len, pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id
        )
        if packed.num_rows == 0:
            raise DataError(
                f"Input `{self.name}`: all files are empty, {files[0].path} and {len(files) - 1} more.",
                "Name files with text in them.",
            )
        return packed

    def _documents(self, files: list[TextFile]) -> Iterator[np.ndarray]:
        tokenizer = self.text_tokenizer
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        prefix = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
        for file in files:
            text = self._read(file)
            if text:
                yield np.concatenate([prefix, tokenizer.encode(text).astype(dtype, copy=False)])
            elif not file.by_wildcard:
                raise DataError(f"{file.path} is empty.", "Leave it out of the input's `files`.")

    def _read(self, file: TextFile) -> str:
        try:
            return file.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}.",
                f"Convert it (iconv -t utf-8), or leave it out of the files of input `{self.name}`.",
            ) from None
        except OSError as error:
            hint = "Name the files in it, such as DIR/**/*.txt." if isinstance(error, IsADirectoryError) else None
            raise DataError(
                f"Cannot read {file.path}: {error.strerror}.",
                hint or f"Give this user permission to read it, or leave it out of the files of input `{self.name}`.",
            ) from None

    def _split_files(self) -> list[TextFile]:
        """The files of the split, by name."""
        files = sorted(self._source_files())
        split = self._split_name()
        chosen = [file for file in files if split is None or self._split_of(file.name) == split]
        if not chosen:
            raise DataError(
                f"Input `{self.name}`: none of {len(files)} files is in split `{split}`.",
                "Change eval_fraction, or set split=None and name the files of each input.",
            )
        return chosen

    def _split_name(self) -> str | None:
        return self.split

    def _split_of(self, name: str) -> str:
        digest = hashlib.sha512(name.encode("utf-8", "surrogateescape")).digest()
        return "eval" if int.from_bytes(digest[:8], "big") < self.eval_fraction * 2**64 else "train"

    def _source_files(self) -> list[TextFile]:
        """All files of the data, whatever their split."""
        found: dict[Path, TextFile] = {}
        for pattern in self.files or []:
            for file in _expand(pattern):
                found.setdefault(file.path, file)
        log.debug("Input %s: %d files", self.name, len(found))
        return list(found.values())


def _expand(pattern: str) -> list[TextFile]:
    """The files of a path or glob, each named by its path below the part without wildcards."""
    path = os.path.abspath(os.path.expanduser(pattern))
    if not any(character in path for character in _WILDCARDS) or os.path.exists(path):
        if not os.path.exists(path):
            raise DataError(f"There is no file {pattern}.", "Correct the input's `files`.")
        return [TextFile(os.path.basename(path), Path(path), by_wildcard=False)]
    fixed = path[: min(path.find(c) for c in _WILDCARDS if c in path)].rpartition(os.sep)[0]
    matches = [Path(match) for match in glob.glob(path, recursive=True)]
    files = [TextFile(match.relative_to(fixed or os.sep).as_posix(), match) for match in matches if not match.is_dir()]
    if not files:
        raise DataError(f"No file matches {pattern}.", "Correct the input's `files`.")
    return files
