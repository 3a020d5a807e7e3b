"""Differences between two configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

ABSENT: Final = object()
"""The value of a path that only the other config has."""


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
