"""Text of files as language-model batches: plain text, JSON lines, Parquet, ArrayRecord, token files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paxcli.config.configurable import template
from paxcli.errors import ConfigError, DataError, did_you_mean
from paxcli.inputs.base_input import RandomAccessInput, language_spec
from paxcli.inputs.corpus import Corpus, Packing, open_token_files, tokenize_text
from paxcli.inputs.documents import FORMATS, TOKENS, Reading, format_of
from paxcli.inputs.files import SourceFile, find_files
from paxcli.inputs.packing import CONCAT, PACKINGS
from paxcli.inputs.token_files import TokenFileInfo, read_info
from paxcli.inputs.tokenizers import ByteTokenizer, Tokenizer
from paxcli.inputs.tokenizing import Tokenizing
from paxcli.log import log
from paxcli.nested_map import NestedMap

_SPLITS = ("train", "eval")
_POLICIES = ("error", "skip")


@dataclasses.dataclass(kw_only=True)
class TextInput(RandomAccessInput):
    """Text as language-model batches: documents packed into rows, and nothing dropped unless asked.

    A plain file is one document; JSON lines, Parquet and ArrayRecord hold many. They are read and tokenized once, at
    the first batch; ids of ArrayRecord and Parquet stay in a temporary file, others in memory. Token files, which
    `pax data tokenize` writes, are memory-mapped and start at once, whatever their size; rows begin anew at each file.

    Args:
      files: Paths and globs (`~` and `**` too), local or `gs://`. A file matched twice counts once.
      format: `text`, `jsonl`, `parquet`, `arrayrecord` or `tokens`. None: each file by its suffix.
      text_field: Field or column that holds the text. None: a record of an ArrayRecord is the text itself.
      tokenizer: Template of the tokenizer. Token files need it only where ids become text.
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: The model's, which the tokenizer's must fit. None: the trainer sets it.
      packing: `concat`: documents end to end, cut every T tokens. `first_fit`: a document is cut only if it is longer
        than T, and rows are padded. `one_per_row`: the same, with one document in each row.
      drop_longer_than: Documents of more tokens are left out, and counted. None: none is.
      shuffle: Whether rows are shuffled, anew in each epoch. None: in training.
      split: `train` or `eval`: only the files that a digest of their name puts there. None: all files.
      eval_fraction: The share of files in `eval`.
      on_bad_record: `error`: a record that cannot be read ends the run. `skip`: it is left out, counted and logged.
      bad_record_budget: How many may be left out.
      num_workers: Processes that tokenize. 0: this one does.
      cache_dir: Where token files and ArrayRecords of a bucket are copied to. None: a temporary directory.
    """

    files: list[str] | None = None
    format: str | None = None
    text_field: str | None = "text"
    tokenizer: Callable[[], Tokenizer] = template(ByteTokenizer)
    seq_len: int | None = None
    vocab_size: int | None = None
    packing: str = CONCAT
    drop_longer_than: int | None = None
    shuffle: bool | None = None
    split: str | None = None
    eval_fraction: float = 0.03
    on_bad_record: str = "error"
    bad_record_budget: int = 100
    num_workers: int = 0
    cache_dir: str | None = None

    def validate(self) -> None:
        super().validate()
        self._validate_files()
        if not self._names_token_files():
            self.tokenizer()  # reads nothing, but refuses to be without a path
        self._check_choice("format", self.format, FORMATS)
        self._check_choice("packing", self.packing, PACKINGS)
        self._check_choice("split", self.split, _SPLITS)
        self._check_choice("on_bad_record", self.on_bad_record, _POLICIES)
        for field, least in (("seq_len", 1), ("drop_longer_than", 1), ("bad_record_budget", 0), ("num_workers", 0)):
            value = getattr(self, field)
            if (value is None and field == "seq_len") or (value is not None and value < least):
                raise ConfigError(f"Input `{self.name}`: {field} is {value}.", f"Set it to {least} or more.")
        if not 0 < self.eval_fraction < 1:
            raise ConfigError(f"Input `{self.name}`: eval_fraction is {self.eval_fraction}.", "Set it between 0 and 1.")

    def _check_choice(self, field: str, value: str | None, choices: Sequence[str]) -> None:
        if value not in (choices if field in ("packing", "on_bad_record") else (None, *choices)):
            hint = did_you_mean(str(value), choices) or f"Use one of {', '.join(choices)}."
            raise ConfigError(f"Input `{self.name}`: there is no {field} `{value}`.", hint)

    def _validate_files(self) -> None:
        if not self.files or isinstance(self.files, str):
            field = "train_input.files" if self.is_training else "eval_inputs.0.files"
            raise ConfigError(
                f"Input `{self.name}`: files is {self.files!r}.",
                f"Set it to a list, such as --set {field}='[~/text/**/*.txt]', or use `--overlay synthetic-data`.",
            )

    def _names_token_files(self) -> bool:
        formats = {self.format or format_of(pattern) for pattern in self.files or []}
        return formats == {TOKENS}

    def check_data(self) -> None:
        """Reads and tokenizes all files; opens token files.

        Raises:
          ConfigError: There are ids that the model lacks.
          DataError: A file or glob that gives no text, or a record that cannot be read.
        """
        self.validate()
        self.num_rows()

    def element_spec(self) -> NestedMap:
        return language_spec(self.batch_size, self.seq_len)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        tokenizer = self._shown_tokenizer
        if tokenizer is None:
            return super().ids_to_strings(ids, lengths, key)
        return [tokenizer.decode(row[:length]) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    def special_tokens(self) -> dict[int, str]:
        known = self._shown_tokenizer or self._token_info
        tokens = {known.pad_id: "<pad>", known.eos_id: "<eos>"}
        bos_id = getattr(known, "bos_id", None)
        return tokens if bos_id is None else tokens | {bos_id: "<bos>"}

    def num_rows(self) -> int:
        return int(self._corpus.first_rows[-1])

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return self._corpus.rows(numbers)

    def order(self, positions: np.ndarray) -> np.ndarray:
        shuffles = self.is_training if self.shuffle is None else self.shuffle
        if not shuffles:
            return super().order(positions)
        return np.fromiter((self._shuffled[position] for position in positions.tolist()), np.int64, len(positions))

    def data_fingerprint(self) -> Any:
        return self._corpus.checksum

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"bad_records": len(self.bad_records)}

    @property
    def bad_records(self) -> Sequence[str]:
        """What was left out because it cannot be read, and where."""
        return self._corpus.bad_records

    @property
    def num_dropped(self) -> int:
        """Documents left out by `drop_longer_than`."""
        return self._corpus.num_dropped

    @functools.cached_property
    def _shuffled(self) -> Any:
        # Any row can be had at once, so Grain's part is their order alone: no threads, no prefetch, no copies.
        import grain

        return grain.MapDataset.range(self.num_rows()).shuffle(seed=self.seed).repeat()

    @functools.cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, known to fit the model's vocabulary, and the token files if these are read."""
        tokenizer = self.tokenizer()
        self._check_fits_model("the tokenizer has", tokenizer.vocab_size)
        if self._names_token_files() and tokenizer.vocab_size != self._token_info.vocab_size:
            raise ConfigError(
                f"Input `{self.name}`: the token files have {self._token_info.vocab_size} ids, "
                f"but {type(tokenizer).__name__} has {tokenizer.vocab_size}.",
                "Set the input's tokenizer to the one that made them.",
            )
        return tokenizer

    @functools.cached_property
    def _shown_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where token files are read without the one that made them."""
        try:
            return self.text_tokenizer
        except ConfigError:
            if not self._names_token_files():
                raise
            return None

    @functools.cached_property
    def _token_info(self) -> TokenFileInfo:
        """What the token files say of themselves."""
        info = read_info(self._files[0].path)
        self._check_fits_model("the token files have", info.vocab_size)
        return info

    def _check_fits_model(self, what: str, vocab_size: int) -> None:
        if self.vocab_size is not None and vocab_size > self.vocab_size:
            raise ConfigError(
                f"Input `{self.name}`: {what} {vocab_size} ids, but the model's vocab_size is {self.vocab_size}.",
                f"Set the model's vocab_size to {vocab_size} or more.",
            )

    def _read_corpus(self) -> Corpus:
        assert self.seq_len is not None
        packing = Packing(self.seq_len, self.packing, self.drop_longer_than)
        if self._names_token_files():
            return open_token_files(self._files, self._token_info, packing, self.cache_dir)
        self._check_no_token_files()
        reading = Reading(self.format, self.text_field, self.on_bad_record, self.bad_record_budget, self.cache_dir)
        how = Tokenizing(reading, self.tokenizer)
        return tokenize_text(self._files, how, self.text_tokenizer, packing, self.num_workers)

    @functools.cached_property
    def _corpus(self) -> Corpus:
        corpus = self._read_corpus()
        for count, what in (
            (len(corpus.bad_records), "bad records"),
            (corpus.num_dropped, "documents that are too long"),
        ):
            if count:
                log.warning("Input %s leaves out %d %s.", self.name, count, what)
        if not corpus.first_rows[-1]:
            raise DataError(
                f"Input `{self.name}`: all files are empty, {self._files[0].path} and {len(self._files) - 1} more.",
                "Name files with text in them.",
            )
        return corpus

    def _check_no_token_files(self) -> None:
        file = next((file for file in self._files if self.format is None and format_of(file.name) == TOKENS), None)
        if file is not None:
            raise ConfigError(
                f"Input `{self.name}`: {file.path} is a token file, but `files` names others too.",
                "Name token files only, as DIR/*.bin, and mix inputs with MixtureInput.",
            )

    @functools.cached_property
    def _files(self) -> list[SourceFile]:
        return self._split_files()

    def _split_files(self) -> list[SourceFile]:
        """The files of the split, by name."""
        files = self._source_files()
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

    def _source_files(self) -> list[SourceFile]:
        """All files of the data by name, whatever their split."""
        return find_files(self.files or [])
