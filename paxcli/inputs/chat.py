"""Conversations as language-model batches for supervised fine-tuning, with the loss on the assistant's turns only."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from paxcli.errors import DataError
from paxcli.inputs.chat_template import ChatTemplate, load_chat_template
from paxcli.inputs.conversations import MESSAGE_FIELDS, OTHER_FIELDS, PROMPT, Messages, messages_of, template_variables
from paxcli.inputs.corpus import Corpus
from paxcli.inputs.documents import COLUMNS_HINT, FIX_HINT, TEXT, TOKENS, BadRecords, Reading, check_unicode, format_of
from paxcli.inputs.files import SourceFile
from paxcli.inputs.packing import PackedTokens
from paxcli.inputs.processes import map_in_processes
from paxcli.inputs.text import TextInput
from paxcli.inputs.token_files import dtype_for
from paxcli.inputs.tokenizers import Tokenizer, TokenizerTemplate
from paxcli.log import log


class TokenizedChats(NamedTuple):
    """Tokenized conversations.

    Attributes:
      ids: The concatenated tokens of all conversations [N].
      is_target: Whether a token belongs to an assistant's turn [N].
      lengths: Number of tokens of each conversation [C].
      bad_records: The error message of each skipped record.
    """

    ids: np.ndarray
    is_target: np.ndarray
    lengths: np.ndarray
    bad_records: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatReading(Reading):
    """Reads and tokenizes conversations.

    Attributes:
      layout_fields: Fields of a conversation in the published layouts, besides `text_field`.
      column_map: Names in the files of fields of a layout.
      tokenizer: Template of the tokenizer. Each process builds its own.
      chat_template: A Jinja template, or the path of one.
      template_date: The date that `strftime_now` formats.
    """

    empty_cell: ClassVar[str | None] = None
    layout_fields: ClassVar[tuple[str, ...]] = MESSAGE_FIELDS

    text_field: str | None = "messages"
    column_map: dict[str, str] | None = None
    tokenizer: TokenizerTemplate
    chat_template: str | None
    template_date: str

    def tokenize(self, file: SourceFile) -> TokenizedChats:
        """The conversations of one file."""
        bad = BadRecords(self.on_bad_record, self.bad_record_budget)
        chats = [(np.zeros(0, dtype_for(self._tokenizer.vocab_size)), np.zeros(0, bool)), *self.documents(file, bad)]
        ids, is_target = (np.concatenate(arrays) for arrays in zip(*chats, strict=True))
        return TokenizedChats(ids, is_target, np.array([len(ids) for ids, _ in chats[1:]], np.int64), bad.found)

    def document_of(self, record: dict[str, Any], place: str) -> Any:
        """The conversation of a record, as `encode` returns it."""
        return self.encode(messages_of(record, str(self.text_field), place, self.column_map or {}), record, place)

    def encode(self, messages: Messages, record: dict[str, Any], place: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a conversation [T], and whether each belongs to an assistant's turn [T].

        Args:
          messages: The conversation.
          record: The record that it is from, which may have variables for the chat template.
          place: File and line of the record, for errors.
        """
        text, turns = self.template.render(messages, place, template_variables(record, place))
        check_unicode(text, place)
        ids, offsets = self._tokenizer.encode_chat(text)
        # As in Hugging Face transformers, a token belongs to a turn if any of its characters does.
        is_target = np.zeros(len(ids), bool)
        for start, end in turns:
            is_target |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        if not is_target[1:].any():
            raise DataError(f"{place}: the chat template writes no text of the assistant.", FIX_HINT)
        return ids.astype(dtype_for(self._tokenizer.vocab_size)), is_target

    def columns(self, schema: Any, file: SourceFile) -> list[str]:
        mapped, found = {*(self.column_map or {}).values()}, {*schema.names}
        known = {str(self.text_field), *self.layout_fields, *mapped}
        if not mapped <= found or not known & found:
            lacks = "`, nor `".join(sorted(mapped - found) or (str(self.text_field), PROMPT))
            raise DataError(f"{file.path} has no column `{lacks}`; it has {', '.join(schema.names)}.", COLUMNS_HINT)
        return [name for name in schema.names if name in known or name in OTHER_FIELDS]

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template that renders records."""
        date = datetime.datetime.fromisoformat(self.template_date)
        return load_chat_template(self.chat_template, self._tokenizer, date)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.tokenizer()


@dataclasses.dataclass(kw_only=True)
class ChatInput(TextInput):
    """Conversations as language-model batches for supervised fine-tuning (SFT).

    A record has `messages`, a list of `{"role": …, "content": …}`, ShareGPT's `conversations`, or a `prompt` and its
    `response` or `completion`, which may be lists of messages too, or Alpaca's `instruction`, `input` and `output`. It
    may have a `system` prompt. A chat template renders it as text, with the functions in `tools` and the variables in
    `chat_template_kwargs`. The loss weight is 1 for tokens of assistant
    turns, including the token that ends a turn, and 0 for all others. Conversations of more than T tokens are
    truncated, or dropped if no assistant token is left; a warning reports both counts.

    Reading, shuffling, sharding over hosts and resuming work as in `TextInput`. Arguments that differ from it:

    Args:
      files: Paths and globs of JSON lines, CSV, TSV, Parquet and ArrayRecord files.
      format: `jsonl`, `csv`, `tsv`, `parquet` or `arrayrecord`. None: by each file's suffix.
      text_field: Field or column with the messages. Records without it have a prompt and a response.
      column_map: Fields or columns with the prompt and its completion, if their names are of no layout, such as
        `{prompt: question, completion: answer}`. Messages are then not read.
      chat_template: A Jinja template, or the path of one (`*.jinja`). None: `chat_template.jinja` or
        `tokenizer_config.json` next to the tokenizer's file, or else a plain template.
      template_date: The date, YYYY-MM-DD, that `strftime_now` in a template formats. It is fixed because a resumed run
        must read the same tokens.
      packing: `first_fit`: several conversations per row. `one_per_row`: one. Both pad rows.
      drop_longer_than: Drop and count conversations with more tokens, instead of truncating them. None: truncate them.

    Attributes:
      reading: What reads its records.
      chats_per_record: Conversations of a record, which are dropped together.
    """

    reading: ClassVar[type[ChatReading]] = ChatReading
    chats_per_record: ClassVar[int] = 1

    format: Literal["jsonl", "csv", "tsv", "parquet", "arrayrecord"] | None = None  # pyrefly: ignore
    text_field: str | None = "messages"
    column_map: dict[Literal["prompt", "completion"], str] | None = None
    chat_template: str | None = None
    template_date: str = "2024-07-26"
    packing: Literal["first_fit", "one_per_row"] = "first_fit"  # pyrefly: ignore

    def validate(self) -> None:
        super().validate()
        if self.text_field is None or (self.column_map and self.text_field != type(self).text_field):
            self.refuse(f"text_field is {self.text_field}, column_map is {self.column_map}.", "Set one of them.")
        try:
            datetime.date.fromisoformat(self.template_date)
        except ValueError:
            self.refuse(f"template_date is {self.template_date!r}.", "Write it as in 2024-07-26.")

    def prompt_template(self) -> ChatTemplate:
        """The template that renders the conversations."""
        return self.reading.of(self).template

    def _read_corpus(self) -> Corpus:
        for file in self._files:
            if self.format is None and format_of(file.name) in (TEXT, TOKENS):
                hint = "Of a directory, give DIR/*.jsonl. If all files have JSON objects, set format=jsonl."
                self.refuse(f"{file.path} has no suffix of JSON lines, CSV, TSV, Parquet or ArrayRecord.", hint)
        tokenizer = self.text_tokenizer
        chats = self._tokenize_files()
        pack, num_truncated = self._pack_chats(chats)
        num_chats = len(chats.lengths)
        if not pack.num_documents:
            hint = "Set `files` to files with conversations, or raise seq_len or drop_longer_than."
            self.refuse(f"none of {num_chats} conversations in {len(self._files)} files is usable.", hint, DataError)
        if num_truncated:
            log.warning("Input %s truncated %d conversations to %d tokens.", self.name, num_truncated, self.seq_len)
        num_dropped = (num_chats - pack.num_documents) // self.chats_per_record
        return Corpus([pack], chats.bad_records, num_dropped, [], tokenizer.vocab_size, pack.checksum, num_truncated)

    def _tokenize_files(self) -> TokenizedChats:
        """All conversations, tokenized in `num_workers` processes (0: in this one)."""
        by_file = dict(map_in_processes(self.reading.of(self).tokenize, self._files, self.num_workers))
        bad = BadRecords(self.on_bad_record, self.bad_record_budget)
        parts = [by_file[file] for file in self._files]
        bad.add_skipped([record for part in parts for record in part.bad_records])
        ids, is_target, lengths = (np.concatenate(arrays) for arrays in zip(*(p[:3] for p in parts), strict=True))
        return TokenizedChats(ids, is_target, lengths, bad.found)

    def _pack_chats(self, chats: TokenizedChats) -> tuple[PackedTokens, int]:
        """Packs conversations, truncated to T tokens with a label, and counts those that are truncated.

        Drops those of more than `drop_longer_than` tokens, and those without a target after truncation.
        """
        assert self.seq_len is not None
        begins = np.cumsum(chats.lengths) - chats.lengths
        num_tokens = chats.lengths - 1  # the last one has no label
        lengths = np.minimum(num_tokens, self.seq_len)
        labels = zip((begins + 1).tolist(), (begins + 1 + lengths).tolist(), strict=True)
        kept = np.array([chats.is_target[first:end].any() for first, end in labels], bool)
        if self.drop_longer_than is not None:
            kept &= num_tokens <= self.drop_longer_than
        kept = np.repeat(kept.reshape(-1, self.chats_per_record).all(axis=1), self.chats_per_record)
        pack = PackedTokens(
            tokens=chats.ids,
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])]),
            seq_len=self.seq_len,
            pad_id=self.text_tokenizer.pad_id,
            packing=self.packing,
            begins=begins[kept],
            loss_weights=chats.is_target,
        )
        return pack, int((kept & (num_tokens > self.seq_len)).sum())
