"""Reads the launches in a launch script, a config, a file of benchmarks, or `key=value` words."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.benchmark_file import read_benchmarks
from paxcli.convert.maxtext.launch import Diagnostic, Launch, LaunchFile, Pair
from paxcli.convert.maxtext.shell import NO_TRAINING, read_script
from paxcli.convert.maxtext.shell_words import Word
from paxcli.convert.maxtext.yml import BASE, commands_in_manifest, find_beside, read_text, read_yml
from paxcli.errors import ConfigError


def read_source(words: Sequence[str], arguments: Mapping[str, str] | None = None) -> LaunchFile:
    """Reads one file, or `key=value` words.

    Args:
      words: A path; or keys with their values.
      arguments: Variables and positional arguments of a script.

    Raises:
      ConfigError: There is nothing to read, or no training in it.
    """
    if len(words) == 1 and ("=" not in words[0] or Path(words[0]).is_file()):
        return read_file(Path(words[0]), arguments)
    launch = Launch(1)
    launch.read_arguments([Word(word) for word in words], range(1, len(words) + 1))
    if launch.config or launch.diagnostics:
        problem = f"`{launch.config or launch.diagnostics[0].text}` is neither a file nor key=value."
        raise ConfigError(problem, "For example `model_name=llama2-7b steps=10`.")
    return LaunchFile([launch])


def read_file(path: Path, arguments: Mapping[str, str] | None = None) -> LaunchFile:
    """The launches of a script, a `.yml`, a Python file of benchmarks, or a file of `key=value`."""
    text = read_text(path)
    if path.suffix in (".yml", ".yaml"):
        commands = commands_in_manifest(text)
        if commands is None:
            return LaunchFile([read_yml(text, path)])
        text = "\n".join(commands)
    if path.suffix == ".py":
        return read_benchmarks(text, path, arguments or {})
    file = read_script(text, arguments, lambda name: _other_script(path, name))
    if not file.launches and (bare := _bare_pairs(text)) is not None:
        return LaunchFile([bare])
    if not file.launches:
        raise ConfigError(f"{path} starts no MaxText training.", _other_contents(file))
    for launch in file.launches:
        _read_config(launch, path)
    return file


def _other_script(path: Path, name: str) -> str | None:
    found = find_beside(path, name)
    try:
        return read_text(found) if found is not None and found.suffix in (".sh", ".env", "") else None
    except ConfigError:
        return None


def _bare_pairs(text: str) -> Launch | None:
    """A file of nothing but `key=value` words, as one launch; None for any other file."""
    lines = enumerate(text.splitlines(), start=1)
    try:
        words = [(word.partition("="), number) for number, line in lines for word in shlex.split(line, comments=True)]
    except ValueError:  # a quote that is never closed
        return None
    pairs = [Pair(key, value, number) for (key, equals, value), number in words if equals and key.islower()]
    return Launch(1, pairs=pairs) if pairs and len(pairs) == len(words) else None


def _read_config(launch: Launch, path: Path) -> None:
    """Adds the keys of the config that a command names; its own keys override them."""
    implied = tables.part("implied_configs")
    named = launch.config or implied.get(re.split("[./]", launch.entry.removesuffix(".py"))[-1], BASE)
    inherited = [pair.value for pair in launch.pairs if pair.key == "base_config"]
    launch.pairs = [pair for pair in launch.pairs if pair.key != "base_config"]
    if named.rpartition("/")[2] == BASE and inherited:
        named = inherited[-1]
    name = named.rpartition("/")[2]
    if name == BASE:
        return
    own = tables.DATA / name
    beside = find_beside(path, named) or (own if name in implied.values() else None)
    if beside == own and launch.config:
        reason = "this config was not found, and MaxText's of August 2026 is read"
        launch.diagnostics.append(Diagnostic(launch.line, name, reason))
    if beside is not None:
        config = read_yml(read_text(beside), beside)
        below = [dataclasses.replace(pair, line=launch.line) for pair in config.pairs]
        given = {pair.key for pair in (*launch.pairs, *launch.overrides)}  # those of `M_…` are in upper case
        launch.pairs = [pair for pair in below if not {pair.key, pair.key.upper()} & given] + launch.pairs
        launch.diagnostics += config.diagnostics
        return
    instead = ", and its keys are not read"
    if all(pair.key != "model_name" for pair in launch.pairs):
        model = name.rpartition(".")[0].replace("_", "-")
        launch.pairs.insert(0, Pair("model_name", model, launch.line))
        instead = f"; assumed to be the model {model}"
    launch.diagnostics.append(Diagnostic(launch.line, name, f"this config was not found{instead}"))


def _other_contents(file: LaunchFile) -> str:
    if file.others:
        other = min(file.others, key=lambda found: found.reason == NO_TRAINING)
        return f"Line {other.line} runs {other.text}: {other.reason}."
    if file.skipped:
        first = min(file.skipped, key=lambda found: "python" not in found.text)
        return f"Skipped, at line {first.line}: {first.text[:80]} ({first.reason}). Give its keys: `model_name=…`."
    return "A launch has a command such as `python3 MaxText/train.py MaxText/configs/base.yml steps=10`."
