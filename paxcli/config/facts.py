"""Checks and look-ups over a config tree, by what its fields state about themselves (`paxcli/config/fields.py`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import fiddle as fdl

from paxcli.config.fields import Mark, annotation_of, marks_of, out_of_range
from paxcli.config.tree import walk
from paxcli.errors import ConfigError


def check_range(path: str, value: Any, annotation: Any) -> None:
    """Raises a ConfigError when a number or a word of `value` is not among those that `annotation` allows."""
    if error := out_of_range(path, value, annotation):
        raise ConfigError(error)


def check_ranges(config: fdl.Buildable) -> None:
    """Raises a ConfigError when any value of a config tree, defaults included, is not among those its field allows."""
    for node in walk(config):
        if node.is_shown:
            check_range(node.path, node.value, node.annotation)


def check_fields(instance: Any, prefix: str = "") -> None:
    """Raises a ConfigError when a field of an object does not allow its value; `prefix` begins the message."""
    for field in dataclasses.fields(instance):
        check_range(prefix + field.name, getattr(instance, field.name), annotation_of(type(instance), field.name))


def marked_paths(config: fdl.Buildable, mark: Mark) -> tuple[str, ...]:
    """The full paths of the fields of a config tree that carry `mark`."""
    return tuple(node.path for node in walk(config) if mark in marks_of(node.annotation))


def is_at_or_below(path: str, roots: tuple[str, ...]) -> bool:
    """Whether `path` is one of the paths `roots`, or a field below one of them."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)
