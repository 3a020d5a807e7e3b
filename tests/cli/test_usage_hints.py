"""Usage errors name what to type instead."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest

from paxcli.cli.usage_hints import usage_hint

Pax = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("word", "verb"),
    [("generate", "pax decode"), ("finetune", "pax train"), ("serve", "pax export"), ("ls", "recipes ls")],
)
def test_the_word_of_another_tool_names_the_verb(word: str, verb: str) -> None:
    assert verb in usage_hint([word, "tiny"], "pax")


def test_a_bare_value_is_shown_with_set() -> None:
    hint = usage_hint(["train", "tiny", "--set", "a=1", "num_layers=3", "files=[a b]"], "pax train")
    assert "`--set num_layers=3 --set 'files=[a b]'`" in hint and "a=1" not in hint
    assert usage_hint(["train", "--sett=a"], "pax train") == "See `pax train --help`."


def test_the_command_line_says_so(pax: Pax) -> None:
    assert "--set num_layers=3" in pax("train", "tiny", "num_layers=3").stderr
    assert "`pax decode`" in pax("chat", "--json").stdout


def test_recipes_that_differ_exit_with_one_when_asked(pax: Pax, tmp_path: pathlib.Path) -> None:
    assert pax("recipes", "diff", "tiny", "tiny-synthetic", "--exit-code").returncode == 1
    assert pax("recipes", "diff", "tiny", "tiny", "--exit-code").returncode == 0
