from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.chat_template import ChatTemplate, load_chat_template
from paxcli.inputs.tokenizers import ByteTokenizer
from tests.inputs.hf_chat import CASES, REFERENCE, chat_template, messages, write_tokenizer

DATE = datetime.datetime(2024, 7, 26)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TWO_TURNS = [*CHAT, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"}, DATE, "a.jinja")


def turns(source: str, chat=TWO_TURNS) -> list[str]:
    text, spans = template(source).render(chat, "a.jsonl, line 1")
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("marks_turns", [True, False], ids=["generation-blocks", "prefixes"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['template']}-{case['chat']}")
def test_text_tokens_and_mask_equal_those_of_transformers(case, marks_turns, tmp_path):
    tokenizer = write_tokenizer(tmp_path)()
    rendered = load_chat_template(chat_template(case, marks_turns), tokenizer, DATE).render(messages(case), "here")
    assert rendered.text == case["text"]
    ids, offsets = tokenizer.encode_chat(rendered.text)
    assert ids.tolist() == case["ids"]
    mask = [any(start < turn[1] and end > turn[0] for turn in rendered.assistant) for start, end in offsets.tolist()]
    np.testing.assert_array_equal(mask, case["mask"])


def test_a_turn_includes_what_ends_it():
    loop = "{% for m in messages %}[{{ m.role }}] {{ m.content }}MARK\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}[assistant] {% endif %}"
    assert turns(loop.replace("MARK", "</s>") + prompt) == ["Hello</s>", "Ciao</s>"]
    # Without an end token, the newline is the mark.
    assert turns(loop.replace("MARK", "{{ '\\n' }}") + prompt) == ["Hello\n\n", "Ciao\n\n"]


class TestUnknownMask:
    def check(self, source: str, message: str) -> None:
        with pytest.raises(DataError, match=message) as caught:
            turns(source)
        assert "a.jsonl, line 1" in caught.value.message
        assert "{% generation %}" in caught.value.hint

    def test_earlier_turns_are_rendered_differently(self):
        think = "{% for m in messages %}[{{ m.role }}]{% if loop.last %}<think>{% endif %}{{ m.content }}{% endfor %}"
        self.check(think, "the text up to message 1 does not begin all text")

    def test_a_header_and_no_generation_prompt(self):
        self.check("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", "writes no generation prompt")

    def test_generation_block_in_a_macro_that_moves_it(self):
        self.check(
            "{% macro f(x) %}> {% generation %}{{ x }}{% endgeneration %}{% endmacro %}{{ f(messages[1].content) }}",
            "generation block inside a macro",
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "fails: Roles must alternate"),
        ("{{ messages[9].content.x }}", "fails: UndefinedError"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{{ range(10 ** 9) }}", "fails: OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 2,000,000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "more than 2,000,000 steps",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "more than 16,777,216 characters"),
        ("{{ 'x' * 10 ** 12 }}", "a value of size 1,000,000,000,000"),
        ("{{ 10 ** (10 ** 9) }}", "a value of size"),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "value of size",
        ),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "value of size",
        ),
        (
            "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
            "{% set n.x = y %}{% endfor %}",
            "value of size",
        ),
    ],
)
def test_a_template_that_fails_or_exceeds_a_limit_names_the_row(source, message):
    with pytest.raises(DataError, match=r"a.jsonl, line 1: the chat template of a.jinja .*" + message) as caught:
        turns(source)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% for m in %}", "line 2, is not valid Jinja"),
        ("{% generation %}", "endgeneration"),
        ("{{ " + "(" * 3000, "is nested too deeply|not valid"),
        (" " * 2**21, "2097152 characters"),
    ],
)
def test_invalid_jinja_is_a_configuration_error(source, message):
    with pytest.raises(ConfigError, match=message):
        template(source)


def test_loops_know_their_length_and_neighbours():
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem.role if loop.previtem }}{% endfor %}"
    )
    assert template("{% generation %}{% endgeneration %}" + source).render(CHAT, "").text == "1/22/2user"


def test_the_date_is_fixed():
    source = "{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}"
    assert turns(source) == ["26 Jul 2024"]


class TestSource:
    """The template of the recipe, of `chat_template.jinja`, of `tokenizer_config.json`, or the default."""

    def text(self, tokenizer, source=None) -> str:
        return load_chat_template(source, tokenizer, DATE).render(CHAT, "").text

    def test_order_of_precedence(self, tmp_path):
        mark = "{% generation %}{% endgeneration %}"
        tokenizer = write_tokenizer(tmp_path)()
        assert self.text(tokenizer) == "<s><|user|>\nHi\n<|assistant|>\nHello</s>\n"
        config = {"chat_template": f"{mark}config {{{{ unk_token }}}}", "unk_token": {"content": "<unk>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert self.text(tokenizer) == "config <unk>"
        named = [{"name": name, "template": f"{mark}{name}"} for name in ("tool_use", "default")]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert self.text(tokenizer) == "default"
        (tmp_path / "chat_template.jinja").write_text(f"{mark}file {{{{ bos_token }}}}")
        assert self.text(tokenizer) == "file <s>"
        (tmp_path / "mine.jinja").write_text(f"{mark}mine")
        assert self.text(tokenizer, str(tmp_path / "mine.jinja")) == "mine"
        assert self.text(tokenizer, f"{mark}recipe") == "recipe"

    def test_bad_files_are_named(self, tmp_path):
        tokenizer = write_tokenizer(tmp_path)()
        with pytest.raises(DataError, match=r"missing.jinja: No such file"):
            self.text(tokenizer, str(tmp_path / "missing.jinja"))
        for content, message in (
            ("{", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("[]", "not an object"),
            ('{"chat_template": 3}', "neither text"),
        ):
            (tmp_path / "tokenizer_config.json").write_text(content)
            with pytest.raises(DataError, match=message):
                self.text(tokenizer)
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(DataError, match="chat_template.jinja is not UTF-8"):
            self.text(tokenizer)

    def test_default_works_with_bytes(self):
        rendered = load_chat_template(None, ByteTokenizer(), DATE).render(TWO_TURNS, "")
        assert [rendered.text[start:end] for start, end in rendered.assistant] == ["Hello<eos>", "Ciao<eos>"]
        assert set(REFERENCE["templates"]) == {"chatml", "headers", "inst", "plain"}


def test_the_template_named_tool_use_renders_conversations_with_tools(tmp_path):
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    named = [{"name": "default", "template": marked}, {"name": "tool_use", "template": "{{ tools | tojson }}" + marked}]
    tokenizer = write_tokenizer(tmp_path)()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    found, chat = load_chat_template(None, tokenizer, DATE), [{"role": "assistant", "content": "a"}]
    assert found.render(chat, "here").text == found.render(chat, "here", {"tools": []}).text == "a"
    assert found.render(chat, "here", {"tools": [1]}).text == "[1]a"
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in (("chat_template.jinja", marked), ("additional_chat_templates/tool_use.jinja", "2" + marked)):
        (tmp_path / name).write_text(text)
    found = load_chat_template(None, tokenizer, DATE)
    assert (found.render(chat, "here").text, found.render(chat, "here", {"tools": [1]}).text) == ("a", "2a")
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(DataError, match="neither text nor a list with one named `default`"):
        load_chat_template(None, tokenizer, DATE)
