"""Reads the messages of a conversation from a record, in the layouts in which chat datasets are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paxcli.errors import DataError, names_hint
from paxcli.inputs.documents import FIX_HINT, lacks_field

CONVERSATIONS = "conversations"  # of ShareGPT
PROMPT, COMPLETION, RESPONSES = "prompt", "completion", ("response", "completion", "output")
INSTRUCTION, INPUTS = "instruction", ("input", "context")  # of Alpaca and Dolly
SYSTEM = "system"
TOOLS, KWARGS = "tools", "chat_template_kwargs"  # of Hugging Face's `apply_chat_template`
MESSAGE_FIELDS = (CONVERSATIONS, PROMPT, INSTRUCTION, *RESPONSES)
OTHER_FIELDS = (*INPUTS, SYSTEM, TOOLS, KWARGS)
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
Record = Mapping[str, Any]
Messages = list[dict[str, Any]]  # each with a role and its content


def messages_of(record: Record, field: str, place: str, columns: Mapping[str, str] = {}) -> Messages:
    """The messages of a record: its `field` or `conversations`, or its prompt and its response.

    A system prompt in its field `system` comes first, if the messages do not begin with one.

    Args:
      record: A JSON object, or a row of a CSV or Parquet file.
      field: Field with the list of messages, each with a `role` and a `content`; as in ShareGPT, `from` and `value`.
      place: File and line of the record, for errors.
      columns: `prompt`, `completion` or both → their names in the record, which then has no messages.

    Raises:
      DataError: The record has neither, or an invalid message, or no assistant message.
    """
    if record.get(field) is None and record.get(CONVERSATIONS) is not None:
        field = CONVERSATIONS
    if columns or record.get(field) is None:
        checked = _prompt_and_response(record, field, place, columns)
    else:
        messages = record[field]
        if not isinstance(messages, list) or not messages:
            what = "empty" if isinstance(messages, list) else f"{type(messages).__name__}, not a list of messages"
            raise DataError(f"{place}: `{field}` is {what}.", FIX_HINT)
        checked = [_check_message(message, f"{place}, message {number}") for number, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in checked):
        raise DataError(f"{place} has no assistant message, so no token would have loss.", FIX_HINT)
    if record.get(SYSTEM) and checked[0]["role"] not in ("system", "developer"):
        return [_check_message({"role": "system", "content": record[SYSTEM]}, f"{place}, `{SYSTEM}`"), *checked]
    return checked


def _prompt_and_response(record: Record, field: str, place: str, columns: Mapping[str, str]) -> Messages:
    questions = (columns[PROMPT],) if PROMPT in columns else (PROMPT, INSTRUCTION)
    answers = (columns[COMPLETION],) if COMPLETION in columns else RESPONSES
    question, answer = (next((x for x in names if record.get(x) is not None), None) for names in (questions, answers))
    if question is None or answer is None:
        both = f"`{questions[0]}` and `{'` or `'.join(answers)}`"
        raise lacks_field(record, f"{place} {'does not have' if columns else f'has neither `{field}` nor'} {both}")
    asked = record[question] if question == questions[0] else _instruction(record)
    return [
        _check_message(message, f"{place}, `{name}`")
        for role, name, content in (("user", question, asked), ("assistant", answer, record[answer]))
        for message in as_messages(content, role)
    ]


def _instruction(record: Mapping[str, Any]) -> Any:
    """An instruction, and on the next line the text that it is about, as LLaMA-Factory joins them."""
    parts = [record[name] for name in (INSTRUCTION, *INPUTS) if record.get(name)]
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts


def as_messages(content: Any, role: str) -> list[Any]:
    """A text as a message of `role`; a list of messages is returned unchanged."""
    is_list = isinstance(content, list) and all(isinstance(message, dict) for message in content)
    return content if is_list else [{"role": role, "content": content}]


def template_variables(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Variables for a chat template: `tools`, and those in `chat_template_kwargs`. Both may be JSON as text."""
    found: dict[str, Any] = {}
    for name in (TOOLS, KWARGS):
        value = record.get(name)
        try:
            found[name] = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise DataError(f"{place}: `{name}` is not JSON: {error}.", FIX_HINT) from None
    more = found.pop(KWARGS) or {}
    if not isinstance(more, dict):
        raise DataError(f"{place}: `{KWARGS}` is {type(more).__name__}, not an object.", FIX_HINT)
    return {name: value for name, value in more.items() if value is not None} | found


def _check_message(message: Any, place: str) -> dict[str, Any]:
    """Checks a message, and drops its null fields: Parquet adds them, and templates test whether a field is defined.

    Raises:
      DataError: It has no known role, or no content.
    """
    if not isinstance(message, dict):
        raise DataError(f"{place} is {type(message).__name__}, not an object with `role` and `content`.", FIX_HINT)
    message = {name: value for name, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role = _SHAREGPT_ROLES.get(str(message["from"]), message["from"])
        message = {"role": role, "content": message.get("value")}
    reasoning = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    if reasoning:  # templates read one of two names, as in Hugging Face transformers
        message = {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
        content = message["content"] = "".join(part["text"] for part in content)
    if role not in ROLES:
        hint = names_hint(str(role), ROLES)
        raise DataError(f"{place} has " + ("no role." if role is None else f"the unknown role {role!r}."), hint)
    if content is None and "content" not in message and message.get("tool_calls"):
        return message
    if not isinstance(content, str):
        what = "no `content`" if content is None else f"`content` of type {type(content).__name__}, not text"
        raise DataError(f"{place} has {what}.", FIX_HINT)
    if role == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise DataError(f"{place} has empty `content`.", FIX_HINT)
    return message
