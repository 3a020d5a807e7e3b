"""A config as plain values that YAML and JSON can hold, and the differences of two."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

import fiddle as fdl

from paxcli.config.tree import walk

# The value of a path that only the other config has.
ABSENT: Final = object()


def plain_values(config: fdl.Buildable) -> dict[str, Any]:
    """Path → plain value of every field of `config`, in tree order.

    The value of a sub-config is its class name; where the same sub-config is used again, the value names the first use.
    """
    values: dict[str, Any] = {}
    first_use: dict[int, str] = {}
    for node in walk(config):
        if not node.is_shown:
            continue
        value = plain(node.value)
        if isinstance(node.value, fdl.Config):
            first = first_use.setdefault(id(node.value), node.path)
            value = value if first == node.path else f"{value}, the one of {first}"
        values[node.path] = value
    return values


def plain(value: Any) -> Any:
    """Converts `value` to None, booleans, numbers, strings, lists and dicts with string keys."""
    if value is None or isinstance(value, enum.Enum):
        return value if value is None else plain(value.value)
    if isinstance(value, bool | int | float | str):
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | set | frozenset) else _name(value)


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The paths whose plain values differ, with both values, in the order of `a` and then of `b`."""
    pairs = ((path, a.get(path, ABSENT), b.get(path, ABSENT)) for path in {**a, **b})
    return [(path, old, new) for path, old, new in pairs if type(old) is not type(new) or old != new]


def changed_lines(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str], most: int = 12) -> str:
    """One line `name: old → new` per name, for an error message, and how many names were left out."""
    names = list(names)
    lines = [f"  {name}: {before.get(name, 'unset')} → {now.get(name, 'unset')}" for name in names[:most]]
    lines += [f"  … and {len(names) - most} more"] if len(names) > most else []
    return "\n".join(lines)


def _name(value: Any) -> str:
    """A name for code and objects that is the same in every process."""
    if isinstance(value, fdl.Buildable):
        return fdl.get_callable(value).__name__
    if isinstance(value, functools.partial):
        arguments = [*map(str, map(plain, value.args)), *(f"{k}={plain(v)}" for k, v in value.keywords.items())]
        return f"{_name(value.func)}({', '.join(arguments)})" if arguments else _name(value.func)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    to_text = getattr(value, "ToText", None)  # Lingvo's params
    shown = to_text() if to_text else repr(value)
    return _name(type(value)) if " at 0x" in shown else shown
