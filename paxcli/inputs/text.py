"""TextInput: language-model batches from plain text, JSON lines, CSV, Parquet, ArrayRecord or token files."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from paxcli.config.configurable import template
from paxcli.config.fields import Common, Derived, NonNegativeInt, PositiveInt, Range, SafeOnResume, Tokens
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.base_input import RandomAccessInput, language_spec
from paxcli.inputs.corpus import Corpus, open_token_files, tokenize_text
from paxcli.inputs.documents import TOKENS, Reading, format_of
from paxcli.inputs.files import SourceFile, find_files
from paxcli.inputs.packing import PackedTokens
from paxcli.inputs.token_files import TokenFileInfo, read_info
from paxcli.inputs.tokenizers import ByteTokenizer, Tokenizer
from paxcli.inputs.tokenizing import Tokenizing
from paxcli.log import log
from paxcli.nested_map import NestedMap


@dataclasses.dataclass(kw_only=True)
class TextInput(RandomAccessInput):
    """Language-model batches of text documents, packed into rows. No text is dropped by default.

    A plain text file is one document; JSON lines, CSV, Parquet and ArrayRecord files have many. They are read and
    tokenized once, before the first batch, and their ids are kept in a temporary file. Token files, which `pax data
    tokenize` writes, are memory-mapped, so they start immediately at any size; rows do not span several token files.

    Args:
      files: Paths and globs (including `~` and `**`), local or `gs://`. Duplicates count once.
      format: `text`, `jsonl`, `csv`, `tsv`, `parquet`, `arrayrecord` or `tokens`. None: by each file's suffix.
      text_field: Field or column with the text. None: the text is an ArrayRecord's full record.
      tokenizer: Template of the tokenizer. Token files need it only to decode ids to text.
      seq_len: T. None: the trainer sets it to the model's max_seq_len.
      vocab_size: The model's vocabulary size, at least the tokenizer's. None: the trainer sets it.
      packing: `concat`: concatenate documents and split them every T tokens. `first_fit`: split only documents of more
        than T tokens, and pad rows. `one_per_row`: the same, with one document in each row.
      drop_longer_than: Drop and count documents with more tokens. None: keep all.
      shuffle: Whether to shuffle rows, differently in each epoch. None: in training.
      split: `train` or `eval`: use only the files of this split, assigned by a hash of their names. None: all files.
      eval_fraction: Fraction of files in `eval`.
      on_bad_record: `error`: stop at a record that cannot be read. `skip`: skip, count and log it.
      bad_record_budget: Maximum number of skipped records.
      num_workers: Number of tokenization processes. 0: tokenize in this process.
      cache_dir: Directory for local copies of a bucket's token files and ArrayRecord files. None: a temporary one.
    """

    required = ("seq_len",)

    files: SafeOnResume[list[str] | None] = None  # a position in other data is refused
    format: Literal["text", "jsonl", "csv", "tsv", "parquet", "arrayrecord", "tokens"] | None = None
    text_field: str | None = "text"
    tokenizer: Common[Callable[[], Tokenizer]] = template(ByteTokenizer)
    seq_len: Derived[Tokens | None] = None
    vocab_size: Derived[PositiveInt | None] = None
    packing: Literal["concat", "first_fit", "one_per_row"] = "concat"
    drop_longer_than: Tokens | None = None
    shuffle: bool | None = None
    split: Literal["train", "eval"] | None = None
    eval_fraction: Annotated[float, Range(above=0, below=1)] = 0.03
    on_bad_record: Literal["error", "skip"] = "error"
    bad_record_budget: NonNegativeInt = 100
    num_workers: SafeOnResume[NonNegativeInt] = 0
    cache_dir: SafeOnResume[str | None] = None

    def validate(self) -> None:
        super().validate()
        self._validate_files()
        if not self._names_token_files():
            self.tokenizer()  # raises ConfigError for a missing path; reads no file

    def _validate_files(self) -> None:
        if not self.files or isinstance(self.files, str):
            field = "train_input.files" if self.is_training else "eval_inputs.0.files"
            hint = f"Set it to a list, such as --set {field}='[~/text/**/*.txt]', or use `--overlay synthetic-data`."
            self.refuse(f"files is {self.files!r}.", hint)

    def _names_token_files(self) -> bool:
        return {self.format or format_of(pattern) for pattern in self.files or []} == {TOKENS}

    def check_data(self) -> None:
        """Reads and tokenizes all files, or opens token files.

        Raises:
          ConfigError: The tokenizer has more ids than the model.
          DataError: A file or glob has no text, or a record cannot be read.
        """
        # For `order`. While it loads, it replaces `__import__` for all threads, so it loads before a run has some.
        import grain.experimental  # noqa: F401

        self.validate()
        self.data_fingerprint()  # of all its rows

    def describe_data(self) -> str:
        if not self._names_token_files():
            _ = self.text_tokenizer  # reads and checks it
        return f"{super().describe_data()}: {len(self._files)} files, {self._files[0].path} first"

    def element_spec(self) -> NestedMap:
        return language_spec(self.batch_size, self.seq_len)

    def ids_to_strings(self, ids: np.ndarray, lengths: Sequence[int], key: str = "ids") -> list[str]:
        if (tokenizer := self._decoding_tokenizer) is None:
            return super().ids_to_strings(ids, lengths, key)
        return [tokenizer.decode(row[:length]) for row, length in zip(np.asarray(ids), lengths, strict=True)]

    def special_tokens(self, key: str = "ids") -> dict[int, str]:
        if (tokenizer := self._decoding_tokenizer) is None:
            return {self._token_info.pad_id: "<pad>", self._token_info.eos_id: "<eos>"}
        named = {tokenizer.pad_id: "<pad>", tokenizer.eos_id: "<eos>", tokenizer.bos_id: "<bos>"}
        return {**tokenizer.special_tokens_by_id, **{token: name for token, name in named.items() if token is not None}}

    def num_rows(self) -> int:
        return int(self.corpus.first_rows[-1])

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return self.corpus.rows(numbers)

    def order(self, positions: np.ndarray) -> np.ndarray:
        if not (self.is_training if self.shuffle is None else self.shuffle):
            return super().order(positions)
        # Grain provides only the order of the rows, that of `MapDataset.shuffle`: with random access, no threads or
        # prefetching are needed.
        from grain.experimental import index_shuffle

        epochs, indices = np.divmod(positions, self.num_rows())
        shuffle = np.frompyfunc(index_shuffle, 4, 1)
        return shuffle(indices, self.num_rows() - 1, (self.seed + epochs) % 2**32, 4).astype(np.int64)

    def data_fingerprint(self) -> Any:
        return self.corpus.checksum

    def prompt_template(self) -> Any:
        """The template of the tokenizer's directory, if it has one."""
        from paxcli.inputs.chat_template import load_chat_template  # here, since it loads Jinja

        found = load_chat_template(None, self.text_tokenizer, datetime.datetime.now())
        return None if found.is_default else found

    @functools.cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, after a check against the model's vocabulary size and that of the token files, if any."""
        tokenizer = self.tokenizer()
        self.check_fits_model("the tokenizer has", tokenizer.vocab_size, self.vocab_size)
        if self._names_token_files() and tokenizer.vocab_size != self._token_info.vocab_size:
            ids = f"{self._token_info.vocab_size} ids, but {type(tokenizer).__name__} has {tokenizer.vocab_size}"
            self.refuse(f"the token files have {ids}.", "Set the input's tokenizer to the one that wrote them.")
        return tokenizer

    @functools.cached_property
    def _decoding_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that decodes ids to text; None for token files without their tokenizer."""
        try:
            return self.text_tokenizer
        except ConfigError:
            if not self._names_token_files():
                raise
            return None

    @functools.cached_property
    def _token_info(self) -> TokenFileInfo:
        """The description of the first token file."""
        info = read_info(self._files[0].path)
        self.check_fits_model("the token files have", info.vocab_size, self.vocab_size)
        return info

    def _pack(self, tokens: np.ndarray, starts: np.ndarray, pad_id: int) -> PackedTokens:
        """Packs documents (see `PackedTokens`), without those that are too long."""
        assert self.seq_len is not None
        pack = PackedTokens(tokens=tokens, starts=starts, seq_len=self.seq_len, pad_id=pad_id, packing=self.packing)
        return pack if self.drop_longer_than is None else pack.drop_longer(self.drop_longer_than)

    def _read_corpus(self) -> Corpus:
        if self._names_token_files():
            return open_token_files(self._files, self._token_info, self._pack, self.cache_dir)
        for file in self._files:
            if self.format is None and format_of(file.name) == TOKENS:
                hint = "Use token files only, such as DIR/*.bin, and combine inputs with MixtureInput."
                self.refuse(f"{file.path} is a token file, but `files` also has other formats.", hint)
        tokenizing = Tokenizing(Reading.of(self), self.tokenizer)
        return tokenize_text(self._files, tokenizing, self.text_tokenizer, self._pack, self.num_workers)

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The documents, packed into rows, and what was skipped. Reads all files, or opens token files."""
        corpus = self._read_corpus()
        if corpus.bad_records:
            log.warning("Input %s skipped %d bad records.", self.name, len(corpus.bad_records))
        if corpus.num_dropped:
            log.warning("Input %s dropped %d documents that are too long.", self.name, corpus.num_dropped)
        if not corpus.first_rows[-1]:
            problem, hint = "all files are empty", "Set `files` to files with text."
            if corpus.num_dropped or corpus.bad_records:
                problem, hint = "all documents are dropped or skipped", "Raise drop_longer_than, or fix the records."
            self.refuse(f"{problem}: {self._files[0].path} and {len(self._files) - 1} more.", hint, DataError)
        return corpus

    @functools.cached_property
    def _files(self) -> list[SourceFile]:
        """The files of the split, sorted by name."""
        files, split = self._source_files(), self._split_name()
        if chosen := [file for file in files if split is None or self._split_of(file.name) == split]:
            return chosen
        hint = "Change eval_fraction, or set split=None and different `files` for each input."
        self.refuse(f"none of {len(files)} files is in split `{split}`.", hint, DataError)

    def _split_name(self) -> str | None:
        return self.split

    def _split_of(self, name: str) -> str:
        digest = hashlib.sha512(name.encode("utf-8", "surrogateescape")).digest()
        return "eval" if int.from_bytes(digest[:8], "big") < self.eval_fraction * 2**64 else "train"

    def _source_files(self) -> list[SourceFile]:
        """All files of all splits, sorted by name."""
        return find_files(self.files or [])
