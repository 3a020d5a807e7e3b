"""Preference pairs: two answers to one prompt, for direct preference optimization (DPO)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from paxcli.errors import DataError
from paxcli.inputs.chat import ChatInput, ChatReading
from paxcli.inputs.conversations import PROMPT, SYSTEM, Messages, as_messages, messages_of
from paxcli.inputs.documents import FIX_HINT, BadRecords, lacks_field
from paxcli.inputs.files import SourceFile
from paxcli.inputs.packing import ONE_PER_ROW
from paxcli.nested_map import NestedMap

CHOSEN, REJECTED = "chosen", "rejected"
_ANSWERING = ("assistant", "tool")  # roles of messages that do not begin a conversation


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairReading(ChatReading):
    """Reads pairs as two conversations: the chosen one, then the rejected one."""

    layout_fields: ClassVar[tuple[str, ...]] = (PROMPT, REJECTED)

    def documents(self, file: SourceFile, bad: BadRecords) -> Iterator[Any]:
        return itertools.chain.from_iterable(super().documents(file, bad))

    def document_of(self, record: dict[str, Any], place: str) -> Any:
        columns = {CHOSEN: CHOSEN, REJECTED: REJECTED, **(self.column_map or {})}
        for name in columns.values():
            if record.get(name) is None:
                raise lacks_field(record, f"{place} has no `{name}`")
        record = record | {name: record[column] for name, column in columns.items()}
        return [self.encode(_messages(record, side, place), record, place) for side in (CHOSEN, REJECTED)]


@dataclasses.dataclass(kw_only=True)
class PreferenceInput(ChatInput):
    """Preference pairs for DPO: a batch of the chosen conversations, and in its field `rejected` one of the others.

    A record has `chosen` and `rejected`: two conversations, as lists of `{"role": …, "content": …}`, or two answers to
    its `prompt`, as texts or messages. It may have a `system` prompt. Conversations contain the `prompt`, if there is
    one. As in `ChatInput`, all assistant turns have weight 1; those before the answers add the same to both
    log-probabilities. A row is one conversation, truncated to T tokens, so `packing` must not be set. A pair is skipped
    or dropped if one of its conversations is. `column_map` names the columns of `prompt`, `chosen` and `rejected`.
    """

    reading: ClassVar[type[ChatReading]] = PairReading
    chats_per_record: ClassVar[int] = 2

    text_field: str | None = CHOSEN
    column_map: dict[Literal["prompt", "chosen", "rejected"], str] | None = None  # pyrefly: ignore
    packing: Literal["first_fit", "one_per_row"] = "one_per_row"

    def validate(self) -> None:
        super().validate()
        if self.packing != ONE_PER_ROW:
            self.refuse(f"packing={self.packing} would separate pairs.", "Leave it at its default.")

    def element_spec(self) -> NestedMap:
        spec = super().element_spec()
        return NestedMap({**spec, REJECTED: spec})

    def num_rows(self) -> int:
        return super().num_rows() // self.chats_per_record

    def rows(self, numbers: np.ndarray) -> NestedMap:
        chosen, rejected = (self.corpus.rows(np.where(numbers < 0, -1, 2 * numbers + side)) for side in (0, 1))
        return NestedMap({**chosen, REJECTED: rejected})


def _messages(record: dict[str, Any], side: str, place: str) -> Messages:
    """The conversation on one side of a pair."""
    prompt = as_messages(record.get(PROMPT) or [], "user")
    if not prompt and isinstance(record[side], str):
        raise lacks_field(record, f"{place} has no `{PROMPT}`, and `{side}` is a text")
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
