"""Prompts with settings of their own, and files of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveFraction, Seed, Tokens, TopK
from paxcli.config.paths import read_text
from paxcli.config.tree import check_fields
from paxcli.errors import ConfigError, PaxError, names_hint
from paxcli.inputs.conversations import messages_of
from paxcli.inputs.documents import JSONL, format_of


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, with settings of its own; None = as for all prompts.

    Attributes:
      prompt: Its text; None = `ids`.
      ids: Its tokens, instead of the text.
      messages: A conversation, instead of the text: `role` and `content` of each message. The answer is the next one.
      tools: Functions that the assistant may call, for the chat template.
      chat_template_kwargs: Further variables for the chat template, such as `{"enable_thinking": false}`.
      continuation: Text after it whose log-probabilities are computed; nothing is generated.
      max_tokens: The most tokens to generate.
      temperature: Temperature.
      top_k: Sample from the k most likely tokens.
      top_p: Sample from the nucleus with this probability.
      repetition_penalty: Penalty on tokens of the prompt and of the text so far.
      stop: Texts that end the answer.
      seed: Seed of the sampling, which then does not depend on the other prompts.
      place: File and line that the prompt comes from, for errors.
    """

    prompt: str | None = None
    ids: list[NonNegativeInt] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continuation: str | None = None
    max_tokens: Tokens | None = None
    temperature: NonNegativeFloat | None = None
    top_k: TopK | None = None
    top_p: PositiveFraction | None = None
    repetition_penalty: PositiveFloat | None = None
    stop: list[str] | None = None
    seed: Seed | None = None
    place: str = ""

    def __str__(self) -> str:
        shown = repr(self.prompt or self.ids or self.messages)
        return f"{self.place}Prompt {shown if len(shown) <= 40 else shown[:38] + '…'}"


PromptLike = str | Mapping[str, Any] | Prompt
_FIELDS = [field.name for field in dataclasses.fields(Prompt) if field.name != "place"]
_UNSET = fdl.Config(Prompt)  # it takes a while to make one
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_prompt(row: PromptLike, place: str = "") -> Prompt:
    """A prompt from its text, or from the fields of `Prompt`.

    Raises:
      ConfigError: A field is unknown or has a wrong value, or there is not one of text, ids and messages.
    """
    if isinstance(row, Prompt):
        return row
    if not isinstance(row, str | Mapping):
        raise ConfigError(f"{place}{row!r} is not a prompt.", 'Write it as {"prompt": "…"}.')
    config = copy.copy(_UNSET)
    try:
        for name, value in ({"prompt": row} if isinstance(row, str) else row).items():
            if name not in _FIELDS:
                raise ConfigError(f"A prompt has no field `{name}`.", names_hint(name, _FIELDS))
            assign(config, name, value)
        config.place = place
        found = fdl.build(config)
        check_fields(found)
        if _SURROGATE.search(json.dumps(dataclasses.asdict(found), ensure_ascii=False)):
            raise ConfigError("A prompt has half a character, a surrogate without the other.", "Write it in UTF-8.")
        if [found.prompt, found.ids, found.messages].count(None) != 2:
            raise ConfigError("A prompt has one of `prompt`, `ids` and `messages`.", "Give it exactly one of them.")
        if found.messages is None and (found.tools or found.chat_template_kwargs):
            raise ConfigError("`tools` and `chat_template_kwargs` are for chats.", "Give `messages`, not a `prompt`.")
        if found.messages is not None:
            messages_of({"messages": [*found.messages, {"role": "assistant", "content": "-"}]}, "messages", "A prompt")
    except PaxError as error:
        raise ConfigError(f"{place}{error.message}", error.hint) from None
    return found


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: its lines, or the objects of a file of JSON lines (`.jsonl`, `.json`, `.ndjson`).

    Raises:
      ConfigError: The file cannot be read or has no prompt, or a line is not one; names the line.
    """
    lines = read_text(path, ConfigError).removeprefix("\ufeff").split("\n")
    places = {f"{path}, line {number}: ": line for number, line in enumerate(lines, 1) if line.strip()}
    if not places:
        raise ConfigError(f"{path} has no prompt.", "Write one per line.")
    parse = _object if format_of(path.name) == JSONL else parse_prompt
    return [parse(line, place) for place, line in places.items()]


def _object(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}not JSON: {error}.", 'Write each line as {"prompt": "…"}.') from None
    return parse_prompt(row, place)
