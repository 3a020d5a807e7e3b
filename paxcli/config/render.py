"""A config as text: to read, to compare, and as a YAML recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import fiddle as fdl
import yaml

from paxcli.config.resolve import Resolved
from paxcli.config.values import plain_values
from paxcli.errors import DataError

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def render_text(resolved: Resolved, color: bool = False) -> str:
    """The tree, one value a line, each with its source; with `color`, defaults are dim."""
    lines = list(_tree_lines(resolved))
    width = max((len(line) for line, _ in lines if len(line) <= 60), default=0)
    texts = [(f"{line:<{width}}  # {source}" if source else line, source) for line, source in lines]
    return "\n".join(f"{_DIM}{text}{_PLAIN}" if color and source == "default" else text for text, source in texts)


def recipe_yaml(resolved: Resolved) -> str:
    """A YAML recipe that resolves to this config."""
    content: dict[str, Any] = {"recipe": resolved.target}
    if resolved.overlays:
        content["overlays"] = list(resolved.overlays)
    if resolved.sets:
        content["set"] = resolved.sets
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def with_set(recipe_text: str, values: Mapping[str, Any]) -> str:
    """The YAML recipe with further paths in `set`."""
    content = yaml.safe_load(recipe_text) or {}
    content["set"] = {**content.get("set", {}), **values}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def config_text(config: fdl.Buildable) -> str:
    """All values of a config, as sorted lines `path = value` with values in JSON."""
    values = plain_values(config)
    return "".join(f"{path} = {value_text(values[path])}\n" for path in sorted(values))


def parse_config_text(text: str) -> dict[str, Any]:
    """Parses the output of `config_text` into path → value.

    Raises:
      DataError: A line is not of that form.
    """
    values = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        path, _, value = line.partition(" = ")
        try:
            values[path] = json.loads(value)
        except (ValueError, RecursionError):
            hint = "Restore the file from a copy."
            raise DataError(f"Line {number} of the saved config is damaged: {line[:80]!r}.", hint) from None
    return values


def value_text(value: Any) -> str:
    """A plain value as the user can write it after `--set PATH=`."""
    return json.dumps(value, ensure_ascii=False)


def _tree_lines(resolved: Resolved) -> Iterator[tuple[str, str]]:
    headed: set[str] = set(resolved.values)
    for path, value in resolved.values.items():
        parts = path.split(".")
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            if above not in headed:
                headed.add(above)
                yield f"{'  ' * (depth - 1)}{parts[depth - 1]}:", ""
        text = value.value if value.is_config else value_text(value.value)
        yield f"{'  ' * (len(parts) - 1)}{parts[-1]}: {text}", value.source
