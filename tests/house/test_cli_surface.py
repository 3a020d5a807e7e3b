"""The command line stays narrow, explained by examples, and quick to start."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from paxcli.cli.main import app

MAX_OPTIONS = 12
# Terms of a cloud order, as in gcloud's own command, are not part of a recipe.
# Tracing and scheduling options of a run must not change its recipe.
# Prompts and sampling are those of one call; what a recipe should record is in its `decoding`.
# Examples and prompts of lm-eval's tasks are those of one call, as in its own command.
WIDE = {("provision", "create"): 20, ("train",): 17, ("decode",): 15, ("eval",): 13}
HEAVY = {"fiddle", "flax", "grain", "jax", "jaxlib", "matplotlib", "numpy", "optax", "orbax", "seqio", "tensorflow"}
# What training starts without. Grain is needed for the first batch, Orbax for the first checkpoint, tensorboardX (which
# loads the clients of buckets) for the first metrics.
LATER = {"grain", "grpc", "jinja2", "matplotlib", "orbax", "pandas", "pyarrow", "requests", "scipy", "sentencepiece"}
LATER |= {"seqio", "tensorboardX", "tensorflow", "tensorstore", "tokenizers", "transformers", "xarray"}


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below `command`, with the words that call it."""
    for word, child in getattr(command, "commands", {}).items():
        yield from verbs(child, (*path, word)) if hasattr(child, "commands") else [((*path, word), child)]


VERBS = dict(verbs(typer.main.get_command(app)))
GROUPS = sorted({path[:-1] for path in VERBS})


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_verb_has_few_options(verb: tuple[str, ...]) -> None:
    """A setting of a run belongs in its recipe, where it is recorded, and not in an option."""
    options = [param.name for param in VERBS[verb].params if param.param_type_name == "option" and param.name != "help"]
    assert len(options) <= WIDE.get(verb, MAX_OPTIONS), options


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_shows_two_examples(verb: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*verb, "--help"])
    assert result.exit_code == 0, result.output
    _, _, examples = result.output.partition("Examples:")
    commands = re.findall(r"^\s+pax .*", examples, re.MULTILINE)
    assert len(commands) >= 2, result.output
    assert any(command.split()[1:].count(word) for command in commands for word in verb[-1:]), result.output


@pytest.mark.parametrize("verb", [*VERBS, *GROUPS], ids=" ".join)
def test_help_fits_on_a_screen(verb: tuple[str, ...]) -> None:
    """40 lines of 100 columns, of which the formatter leaves two free."""
    assert app.info.context_settings["max_content_width"] == 100
    shown = CliRunner().invoke(app, [*verb, "--help"], terminal_width=98).output.splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 100


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: " ".join(group) or "pax")
def test_a_list_of_verbs_shows_whole_sentences(group: tuple[str, ...]) -> None:
    """On 80 columns, of which the formatter leaves two free."""
    shown = CliRunner().invoke(app, [*group, "--help"], terminal_width=78).output
    assert [line for line in shown.partition("Commands:")[2].splitlines() if line.endswith("...")] == []


def modules_loaded(*args: str) -> list[str]:
    """Each import of `pax ARGS…`, over all programs that its process runs."""
    command = [sys.executable, "-X", "importtime", "-m", "paxcli", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return [line.split("|")[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")]


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["--hlep"]], ids=" ".join)
def test_start_up_loads_nothing_heavy(args: list[str]) -> None:
    packages = {module.split(".")[0] for module in modules_loaded(*args)}
    assert "paxcli" in packages
    assert packages & HEAVY == set()


@pytest.mark.parametrize(
    "args", [["train"], ["eval"], ["decode"], ["inspect-input"], ["recipes", "show"]], ids=" ".join
)
def test_an_unknown_recipe_is_refused_before_jax_is_loaded(args: list[str]) -> None:
    modules = modules_loaded(*args, "tinny")
    assert "paxcli.config.load" in modules and "jax" not in modules


def test_verbs_that_compute_nothing_load_no_jax(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}\n')
    (run / "config.txt").write_text("")
    (tmp_path / "text.txt").write_text("Text.")
    report = ["report", str(run), "--out", str(tmp_path / "page.html")]
    tokenize = ["data", "tokenize", str(tmp_path / "text.txt"), "--out", str(tmp_path / "tokens")]
    for command, module in ((report, "paxcli.report.page"), (tokenize, "paxcli.inputs.token_files")):
        modules = modules_loaded(*command)
        assert module in modules and "jax" not in modules


def test_training_starts_without_what_it_needs_later(tmp_path: pathlib.Path) -> None:
    modules = modules_loaded("train", "tiny", "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert {"paxcli.training.loop", "paxcli.models.language_model", "optax"} <= set(modules)
    assert {module.split(".")[0] for module in modules} & LATER == set()
    assert modules.count("paxcli.cli.main") == 1  # the process restarts for huge pages before it imports anything slow
