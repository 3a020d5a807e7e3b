"""Preference pairs: two answers to one prompt, for direct preference optimization (DPO)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import numpy as np

from paxcli.errors import DataError
from paxcli.inputs.chat import ChatInput, ChatReading
from paxcli.inputs.conversations import KWARGS, PROMPT, SYSTEM, TOOLS, as_messages, messages_of
from paxcli.inputs.corpus import Corpus
from paxcli.inputs.documents import FIX_HINT
from paxcli.inputs.packing import ONE_PER_ROW
from paxcli.nested_map import NestedMap

CHOSEN, REJECTED = "chosen", "rejected"
_ANSWERING = ("assistant", "tool")  # roles of messages that do not begin a conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairReading(ChatReading):
    """Reads one side of each pair, `text_field`."""

    def messages(self, record: dict[str, Any], place: str) -> list[dict[str, Any]]:
        side = str(self.text_field)
        for name in (CHOSEN, REJECTED):
            if record.get(name) is None:
                raise DataError(f"{place} has no `{name}`; fields: {', '.join(record) or 'none'}.", FIX_HINT)
        prompt = as_messages(record.get(PROMPT) or [], "user")
        if not prompt and isinstance(record[side], str):
            problem = f"has no `{PROMPT}`, and `{side}` is a text"
            raise DataError(f"{place} {problem}; fields: {', '.join(record)}.", FIX_HINT)
        answer, system = as_messages(record[side], "assistant"), record.get(SYSTEM)
        messages = messages_of({side: [*prompt, *answer], SYSTEM: system}, side, place)
        start = len(messages) - len(answer)
        asked, rest = messages[start - len(prompt) : start], messages[start:]
        if not asked or not rest or rest[0]["role"] in _ANSWERING:
            return messages
        turns, wanted = ([(x["role"], x.get("content", "").strip()) for x in part] for part in (rest, asked))
        if not any(turns[start : start + len(wanted)] == wanted for start in range(len(turns))):
            problem = f"`{side}` begins with messages of the user, and lacks those of `prompt`"
            raise DataError(f"{place}: {problem}.", FIX_HINT)
        return messages_of({side: rest, SYSTEM: system}, side, place)

    def columns(self, schema: Any, file: Any) -> list[str]:
        return [name for name in (PROMPT, CHOSEN, REJECTED, SYSTEM, TOOLS, KWARGS) if name in schema.names]


@dataclasses.dataclass(kw_only=True)
class PreferenceInput(ChatInput):
    """Preference pairs for DPO: a batch of the chosen conversations, and in its field `rejected` one of the others.

    A record has `chosen` and `rejected`: two conversations, as lists of `{"role": …, "content": …}`, or two answers to
    its `prompt`, as texts or messages. It may have a `system` prompt. Conversations contain the `prompt`, if there is
    one. As in `ChatInput`, all assistant turns have weight 1; those before the answers add the same to both
    log-probabilities. A row is one conversation, truncated to T tokens, and has to keep an assistant token. The
    arguments `packing`, `on_bad_record` and `drop_longer_than` of `ChatInput` must not be set.
    """

    reading: ClassVar[type[ChatReading]] = PairReading

    text_field: str | None = CHOSEN
    packing: Literal["first_fit", "one_per_row"] = "one_per_row"

    def validate(self) -> None:
        super().validate()
        if (self.packing, self.on_bad_record, self.drop_longer_than) != (ONE_PER_ROW, "error", None):
            fields = "packing, on_bad_record and drop_longer_than"
            self.refuse(f"{fields} would separate pairs.", "Leave them at their defaults.")

    def element_spec(self) -> NestedMap:
        spec = super().element_spec()
        return NestedMap({**spec, REJECTED: spec})

    def rows(self, numbers: np.ndarray) -> NestedMap:
        return NestedMap({**super().rows(numbers), REJECTED: self._rejected.rows(numbers)})

    def data_fingerprint(self) -> Any:
        return [super().data_fingerprint(), self._rejected.checksum]

    def _read_corpus(self) -> Corpus:
        corpus = super()._read_corpus()
        if corpus.num_dropped:
            problem = f"no assistant token in their first {self.seq_len} tokens"
            what = f"Input `{self.name}`: {corpus.num_dropped} `{self.text_field}` conversations have {problem}."
            raise DataError(what, "Raise seq_len (the model's max_seq_len), or shorten their prompts.")
        return corpus

    @functools.cached_property
    def _rejected(self) -> Corpus:
        return dataclasses.replace(self, text_field=REJECTED).corpus
