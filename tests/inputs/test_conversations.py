from __future__ import annotations

import pytest

from paxcli.errors import DataError
from paxcli.inputs.conversations import messages_of

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ASSISTANT], "prompt": "not this"},
        {"messages": None, "prompt": "Hi", "response": "Hello", "completion": None},
        {"prompt": "Hi", "completion": "Hello"},
        {"messages": [USER | {"tool_calls": None, "name": None}, ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [USER, ASSISTANT | {"content": [{"type": "text", "text": text} for text in ("He", "llo")]}]},
    ],
)
def test_forms_of_a_conversation(record):
    assert messages_of(record, "messages", "here") == [USER, ASSISTANT]


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n1, 2"),
        ({"instruction": "Add.", "input": "", "output": "3", "text": "not this"}, "Add."),
        ({"instruction": "Add.", "context": "1, 2", "response": "3", "category": "sums"}, "Add.\n1, 2"),
        ({"prompt": "Add.", "input": "not this", "output": "3"}, "Add."),
    ],
)
def test_instructions_as_in_alpaca_and_dolly(record, question):
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "3"}]
    assert messages_of(record, "messages", "here") == chat


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"system": "Be brief.", "messages": [USER, ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"system": "Be brief.", "prompt": "Hi", "response": "Hello"}, [SYSTEM, USER, ASSISTANT]),
        ({"system": "not this", "messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER, ASSISTANT]),
        ({"system": "", "messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
    ],
)
def test_a_system_prompt_of_its_own_field(record, messages):
    assert messages_of(record, "messages", "here") == messages


def test_a_tool_call_needs_no_content():
    assert messages_of({"chat": [USER, CALL | {"content": None}]}, "chat", "here") == [USER, CALL]
    assert messages_of({"chat": [USER, CALL | {"content": ""}]}, "chat", "here") == [USER, CALL | {"content": ""}]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_read(name):
    """Qwen's templates read `reasoning_content`, gpt-oss's `thinking`."""
    (_, answer) = messages_of({"messages": [USER, ASSISTANT | {name: "hm"}]}, "messages", "here")
    assert (answer["reasoning_content"], answer["thinking"]) == ("hm", "hm")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "has neither `messages` nor `prompt` and `response` or `completion` or `output`; fields: text"),
        ({"prompt": "Hi"}, "has neither"),
        ({"instruction": "Hi", "input": ["x"], "output": "Hello"}, "`instruction` has `content` of type list"),
        ({"system": ["x"], "messages": [USER, ASSISTANT]}, "`system` has `content` of type list"),
        ({"prompt": ["Hi"], "response": "Hello"}, "`prompt` has `content` of type list"),
        ({"prompt": "Hi", "response": " "}, "`response` has empty `content`"),
        ({"messages": "Hi"}, "`messages` is str, not a list"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["Hi"]}, "message 0 is str, not an object"),
        ({"messages": [USER]}, "no assistant message"),
        ({"conversations": [{"from": "robot", "value": "Hi"}]}, "message 0 has the unknown role 'robot'"),
        ({"conversations": [{"from": ["gpt"], "value": "Hi"}]}, "unknown role"),
        ({"conversations": [{"from": "gpt"}]}, "message 0 has no `content`"),
        ({"messages": [{"content": "Hi"}]}, "message 0 has no role"),
        ({"messages": [USER, {"role": "gpt", "content": "Hi"}]}, "message 1 has the unknown role 'gpt'"),
        ({"messages": [USER, {"role": ["assistant"], "content": "Hi"}]}, "unknown role"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 1 has no `content`"),
        ({"messages": [USER, ASSISTANT | {"content": ""}]}, "message 1 has empty `content`"),
        ({"messages": [USER, ASSISTANT | {"content": [{"type": "text"}]}]}, "`content` of type list"),
    ],
)
def test_a_bad_record_is_named(record, message):
    with pytest.raises(DataError, match=f"a.jsonl, line 3.*{message}") as caught:
        messages_of(record, "messages", "a.jsonl, line 3")
    assert caught.value.hint


def test_only_an_answer_may_not_be_empty():
    chat = [{"role": "user", "content": ""}, {"role": "tool", "content": ""}, {"role": "assistant", "content": "x"}]
    assert messages_of({"messages": chat}, "messages", "here") == chat
