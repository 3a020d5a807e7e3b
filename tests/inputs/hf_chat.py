"""Conversations as rendered by transformers, and a directory with their tokenizer."""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable

from paxcli.inputs.tokenizers import HuggingFaceTokenizer

REFERENCE = json.loads((pathlib.Path(__file__).parents[1] / "data/hf_chat.json").read_text(encoding="utf-8"))
CASES = REFERENCE["references"]


def write_tokenizer(directory: pathlib.Path) -> Callable[[], HuggingFaceTokenizer]:
    """Writes `tokenizer.json`, and returns the template of the tokenizer."""
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(REFERENCE["tokenizer"]), encoding="utf-8")
    return functools.partial(HuggingFaceTokenizer, path=str(path), bos_token="<s>", eos_token="</s>")


def messages(case: dict) -> list[dict]:
    return REFERENCE["chats"][case["chat"]]


def chat_template(case: dict, marks_turns: bool = True) -> str:
    """The template, with its generation blocks or without; both render the same text."""
    source = REFERENCE["templates"][case["template"]]
    return source if marks_turns else re.sub(r"\{%(-?) (?:end)?generation (-?)%\}", r"{#\1 \2#}", source)
