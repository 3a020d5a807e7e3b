"""Usage errors name what to type instead."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest

from paxcli.cli.main import app
from paxcli.cli.output import run
from paxcli.cli.train import run_text
from paxcli.cli.usage_hints import usage_hint
from paxcli.metrics.meter import Record
from paxcli.training.progress import ProgressPrinter

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


def test_the_command_line_says_so(pax_here: Pax) -> None:
    assert "--set num_layers=3" in pax_here("train", "tiny", "num_layers=3").stderr
    assert "`pax decode`" in pax_here("chat", "--json").stdout


def test_an_option_of_another_tool_names_the_field_of_the_recipe(pax_here: Pax) -> None:
    for option, field in (
        ("--lr", "learning_rate"),
        ("--batch-size=4", "global_batch_size"),
        ("--weight-decay", "weight_decay"),
    ):
        wrong = pax_here("train", "tiny", option, "8")
        assert wrong.returncode == 2 and f"`--set {field}=…`" in wrong.stderr, wrong.stderr
    assert "hint: See `pax train --help`." in pax_here("train", "tiny", "--run-dri", "8").stderr
    assert "--set" not in pax_here("doctor", "--lr", "8").stderr
    assert "--set" not in pax_here("decode", "tiny", "--max-new-tokens", "8").stderr  # the error names --max-tokens


def test_recipes_that_differ_exit_with_one_when_asked(pax_here: Pax, tmp_path: pathlib.Path) -> None:
    assert pax_here("recipes", "diff", "tiny", "tiny-synthetic", "--exit-code").returncode == 1
    assert pax_here("recipes", "diff", "tiny", "tiny", "--exit-code").returncode == 0


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("from paxcli.layers import Linear", "It is `from paxcli.layers.linear import Linear`."),
        ("import paxcli.layer.linear", "Did you mean `paxcli.layers`"),
    ],
)
def test_a_wrong_import_names_the_right_one(tmp_path, capsys, line: str, hint: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"from paxcli.config.recipe import recipe\n{line}\n\n@recipe()\ndef mine(): ...\n"
    )
    assert run(app, ["recipes", "show", f"{tmp_path}/mine.py:mine"]) in (2, 3)
    assert hint in capsys.readouterr().err


def test_next_lines_are_quoted_for_the_shell() -> None:
    result = {"run_dir": "runs/my first run", "steps": 4, "loss": 2.5, "eval": {}}
    assert run_text(result).endswith("Next: pax plot 'runs/my first run', pax decode 'runs/my first run'")


def test_a_pipe_gets_no_progress_bar(capfd, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in CI: colors may be wanted in a log, lines that are redrawn are not
    facts = dict.fromkeys(("tokens_per_step", "peak_flops_per_device", "devices", "mesh", "data_seed"), None)
    with ProgressPrinter() as printer:
        printer.start(facts | {"parameters": 1, "global_batch_size": 8, "first_step": 0, "num_train_steps": 9})
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_line_of_progress_fits_and_says_a_thing_once(capfd) -> None:
    values = dict.fromkeys(("skipped_steps", "mfu"), None) | {"loss": 2.25, "log_pplx": 2.25, "learning_rate": 1e-4}
    values |= {"tokens_per_second": 1234567.0, "seconds_left": 123456.0}
    printer = ProgressPrinter()
    for more in ({}, {"log_pplx": 2.0}, {"mfu": 0.5}):
        printer.step(Record(100_000, values | more))
    once, both, known = capfd.readouterr().err.splitlines()
    assert "log_pplx" not in once and "MFU" not in once
    assert "loss 2.2500 · log_pplx 2.0000" in both
    assert "MFU 50.0%" in known and max(map(len, (once, known))) <= 100
