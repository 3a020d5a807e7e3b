"""Reads MaxText's Python files of benchmark configurations by their syntax tree. Never imports them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from paxcli.convert.maxtext.launch import Diagnostic, Launch, LaunchFile, Pair
from paxcli.errors import ConfigError, did_you_mean

# The argument that chooses one configuration of a file: `--arg name=…`.
CHOICE = "name"


def read_benchmarks(text: str, path: Path, arguments: Mapping[str, str]) -> LaunchFile:
    """The configurations of a file: calls with `model_name`, `model_type` and `tuning_params`.

    Raises:
      ConfigError: It is not Python, has no such configuration, or the arguments name something else.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{path} is not Python.", "Name a launch script or a .yml.") from None
    found = {}
    for node in ast.walk(tree):
        fields = {keyword.arg: keyword.value for keyword in node.keywords} if isinstance(node, ast.Call) else {}
        params = fields.get("tuning_params")
        if isinstance(params, ast.Dict):
            found[_text(fields.get("model_name"))] = _launch(node.lineno, fields, params)  # pyrefly: ignore[missing-attribute]
    if not found:
        raise ConfigError(f"{path} has no configuration.", "One has `model_type` and a dictionary `tuning_params`.")
    for name in sorted(arguments.keys() - {CHOICE}):
        raise ConfigError(f"A file of benchmarks has no variable `{name}`.", f"Choose one: `--arg {CHOICE}=…`.")
    chosen = arguments.get(CHOICE)
    if chosen is not None and chosen not in found:
        raise ConfigError(f"{path} has no configuration `{chosen}`.", did_you_mean(chosen, found) or _names(found))
    if chosen is None and len(found) > 1:
        raise ConfigError(f"{path} has {len(found)} configurations.", f"Choose: `--arg {CHOICE}=…`. {_names(found)}")
    return LaunchFile([found[chosen] if chosen is not None else next(iter(found.values()))])


def _launch(line: int, fields: Mapping[str | None, ast.expr], params: ast.Dict) -> Launch:
    launch = Launch(line)
    if model := _text(fields.get("model_type")):
        launch.pairs.append(Pair("model_name", model, line))
    for key, value in zip(params.keys, params.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            launch.pairs.append(Pair(key.value, _text(value), value.lineno))
        else:
            launch.diagnostics.append(Diagnostic(value.lineno, _source(value)[:80], "not a literal key, and left out"))
    if "xla_flags" in fields:
        launch.flags["LIBTPU_INIT_ARGS"] = " ".join(_text(fields["xla_flags"]).split())[:2000]
    return launch


def _text(node: ast.expr | None) -> str:
    """A literal as on a command line; anything else as its source."""
    if node is None:
        return ""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _source(node)
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "(a long expression)"


def _names(found: Mapping[str, Launch]) -> str:
    names = [name for name in found if name]
    return f"It has {', '.join(names[:6])}{', …' if len(names) > 6 else ''}."
