"""Conversations as language-model batches for supervised fine-tuning, with the loss on the assistant's turns only."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.chat_template import ChatTemplate, load_chat_template
from paxcli.inputs.conversations import PROMPT, RESPONSES, messages_of
from paxcli.inputs.corpus import Corpus
from paxcli.inputs.documents import ARRAY_RECORD, JSONL, MEND, PARQUET, BadRecords, Reading, format_of
from paxcli.inputs.files import SourceFile
from paxcli.inputs.packing import FIRST_FIT, ONE_PER_ROW, PackedTokens
from paxcli.inputs.text import TextInput
from paxcli.inputs.token_files import dtype_for
from paxcli.inputs.tokenizers import ByteTokenizer, Tokenizer
from paxcli.inputs.tokenizing import in_processes
from paxcli.log import log

_FORMATS = (JSONL, PARQUET, ARRAY_RECORD)


@dataclasses.dataclass(kw_only=True)
class ChatInput(TextInput):
    """Conversations as language-model batches for supervised fine-tuning (SFT).

    A record holds `messages`, a list of `{"role": …, "content": …}`, or a `prompt` and its `response` or `completion`.
    A chat template renders it as text. Weights are 1 for labels that are tokens of the assistant's turns, each with
    the token that ends it, and 0 elsewhere. Conversations of more than T tokens are truncated, and the log says how
    many; those in which no token of the assistant is left are dropped.

    Reading, order, hosts and resuming are as in `TextInput`, and so are the arguments but for these:

    Args:
      files: Paths and globs of JSON lines, Parquet and ArrayRecord.
      format: `jsonl`, `parquet` or `arrayrecord`. None: each file by its suffix.
      text_field: Field or column that holds the messages. A record without it has a prompt and a response.
      chat_template: A Jinja template, or the path of one (`*.jinja`). None: `chat_template.jinja` or
        `tokenizer_config.json` next to the tokenizer's file, or else a plain template.
      template_date: Year, month and day that `strftime_now` in a template formats. It is fixed, since a resumed run
        must read the same tokens.
      packing: `first_fit`: several conversations in a row, where they fit. `one_per_row`: one. Both pad rows.
      drop_longer_than: Conversations of more tokens are dropped instead of truncated, and counted. None: none is.
    """

    text_field: str | None = "messages"
    chat_template: str | None = None
    template_date: str = "2024-07-26"
    packing: str = FIRST_FIT

    def validate(self) -> None:
        super().validate()
        self._check_choice("packing", self.packing, (FIRST_FIT, ONE_PER_ROW))
        self._check_choice("format", self.format, _FORMATS)
        if self.text_field is None:
            raise ConfigError(f"Input `{self.name}`: text_field is None.", "Name the field with the messages.")
        try:
            datetime.date.fromisoformat(self.template_date)
        except ValueError:
            raise ConfigError(
                f"Input `{self.name}`: template_date is {self.template_date!r}.", "Write it as in 2024-07-26."
            ) from None

    @property
    def num_truncated(self) -> int:
        """Conversations that lost their end because they are longer than T."""
        return self._corpus.num_truncated

    def _read_corpus(self) -> Corpus:
        assert self.seq_len is not None
        reading = ChatReading(
            self.format,
            self.text_field,
            self.on_bad_record,
            self.bad_record_budget,
            self.cache_dir,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            date=datetime.datetime.fromisoformat(self.template_date),
        )
        for file in self._files:
            if self.format is None and format_of(file.name) not in _FORMATS:
                raise ConfigError(
                    f"Input `{self.name}`: {file.path} does not have the suffix of JSON lines, Parquet or ArrayRecord.",
                    "If all files hold a JSON object a line, set format=jsonl.",
                )
        chats = self._read(reading)
        tokenizer = self.text_tokenizer
        limit = np.inf if self.drop_longer_than is None else self.drop_longer_than
        pack, num_truncated = _packed(chats, self.seq_len, limit, tokenizer.pad_id, self.packing)
        if not pack.num_documents:
            raise DataError(
                f"Input `{self.name}`: no conversation is left of {len(chats.lengths)} in {len(self._files)} files.",
                "Name files with conversations, or raise seq_len or drop_longer_than.",
            )
        if num_truncated:
            log.warning("Input %s truncates %d conversations to %d tokens.", self.name, num_truncated, self.seq_len)
        num_dropped = len(chats.lengths) - pack.num_documents
        return Corpus([pack], chats.bad_records, num_dropped, [], tokenizer.vocab_size, pack.checksum, num_truncated)

    def _read(self, reading: ChatReading) -> TokenizedChats:
        """All conversations, tokenized here or in `num_workers` processes."""
        reading.template  # noqa: B018 - an error of it is raised here, before processes start
        by_file: dict[SourceFile, TokenizedChats] = {}
        if self.num_workers:
            by_file.update(in_processes(dataclasses.replace(reading).tokenize, self._files, self.num_workers))
        bad = BadRecords(self.on_bad_record, self.bad_record_budget)
        parts = []
        for file in self._files:
            part = by_file[file] if file in by_file else reading.tokenize(file)
            bad.add_skipped(part.bad_records)
            parts.append(part)
        return TokenizedChats(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.is_target for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            bad.found,
        )


class TokenizedChats(NamedTuple):
    """Conversations as tokens.

    Attributes:
      ids: The tokens of all, end to end [N].
      is_target: Whether a token is of the assistant's turns [N].
      lengths: How many tokens each conversation has [C].
      bad_records: What was left out because it cannot be used, and where.
    """

    ids: np.ndarray
    is_target: np.ndarray
    lengths: np.ndarray
    bad_records: list[str]


@dataclasses.dataclass(frozen=True)
class ChatReading(Reading):
    """How files become conversations, as tokens.

    Attributes:
      tokenizer: Template of the tokenizer, for each process to make its own.
      chat_template: The recipe's; None: the tokenizer's.
      date: What `strftime_now` of the template formats.
    """

    text_field: str | None = "messages"
    tokenizer: Callable[[], Tokenizer] = ByteTokenizer
    chat_template: str | None = None
    date: datetime.datetime = datetime.datetime.min

    def tokenize(self, file: SourceFile) -> TokenizedChats:
        """The conversations of one file."""
        bad = BadRecords(self.policy, self.budget)
        chats = [(np.zeros(0, dtype_for(self._tokenizer.vocab_size)), np.zeros(0, bool)), *self.documents(file, bad)]
        ids, is_target = (np.concatenate(arrays) for arrays in zip(*chats, strict=True))
        return TokenizedChats(ids, is_target, np.array([len(ids) for ids, _ in chats[1:]], np.int64), bad.found)

    def document_of(self, record: dict[str, Any], place: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a conversation [T], and whether each is of the assistant's turns [T]."""
        messages = messages_of(record, str(self.text_field), place)
        text, turns = self.template.render(messages, place)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{place} is not Unicode text: it has {error.object[error.start]!r}.", MEND) from None
        ids, offsets = self._tokenizer.encode_chat(text)
        # As with Hugging Face, a token is of a turn if any of its characters is.
        is_target = np.zeros(len(ids), bool)
        for start, end in turns:
            is_target |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        if not is_target[1:].any():
            raise DataError(f"{place}: the chat template writes no text of the assistant.", MEND)
        return ids.astype(dtype_for(self._tokenizer.vocab_size)), is_target

    def columns(self, schema: Any, file: SourceFile) -> list[str]:
        found = [name for name in (str(self.text_field), PROMPT, *RESPONSES) if name in schema.names]
        if not found:
            raise DataError(
                f"{file.path} has no column `{self.text_field}`, nor `{PROMPT}`; it has {', '.join(schema.names)}.",
                "Set the input's text_field to the column with the messages.",
            )
        return found

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which renders records."""
        return load_chat_template(self.chat_template, self._tokenizer, self.date)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.tokenizer()


def _packed(chats: TokenizedChats, seq_len: int, limit: float, pad_id: int, packing: str) -> tuple[PackedTokens, int]:
    """Rows of conversations, truncated to T tokens with a label, and how many are truncated.

    Left out are those of more than `limit` tokens, and those without a target after truncation.
    """
    begins = np.cumsum(chats.lengths) - chats.lengths
    num_tokens = chats.lengths - 1  # the last one has no label
    lengths = np.minimum(num_tokens, seq_len)
    targets = np.cumsum([0, *chats.is_target], dtype=np.int64)
    kept = (num_tokens <= limit) & (targets[begins + 1 + lengths] > targets[begins + 1])
    pack = PackedTokens(
        tokens=chats.ids,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])]),
        seq_len=seq_len,
        pad_id=pad_id,
        packing=packing,
        begins=begins[kept],
        loss_weights=chats.is_target,
    )
    return pack, int((kept & (num_tokens > seq_len)).sum())
