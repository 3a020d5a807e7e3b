"""The closed lists of classes that YAML and `--set` may name: pax's own, grouped by base class."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing
from typing import Any

import fiddle as fdl

from paxcli.config.configurable import Configurable
from paxcli.config.fields import union_members
from paxcli.config.tree import find, walk
from paxcli.errors import ConfigError

ROOMS = ("paxcli.layers", "paxcli.optim", "paxcli.inputs", "paxcli.models")


def class_of(value: Any) -> type[Configurable] | None:
    """The configurable class of a config, a template, an object or an annotation; None when there is none."""
    if isinstance(value, fdl.Buildable):
        value = fdl.get_callable(value)
    elif isinstance(value, functools.partial):
        value = value.func
    elif typing.get_origin(value) is functools.partial:
        value = typing.get_args(value)[0]
    cls = value if isinstance(value, type) else type(value)
    return cls if issubclass(cls, Configurable) else None


def choices(*values: Any) -> dict[str, type]:
    """Name → class for the classes that can replace one of `values`: configs, templates, classes or annotations.

    A field's value and its declared class both count: where the value is of a user's own class, only the declared class
    has others of its kind. A class whose name in Pax differs has both names.
    """
    return {name: each for cls in map(class_of, values) if cls for name, each in _of_kind(cls).items()}


def _of_kind(cls: type) -> dict[str, type]:
    """The classes of the package of `cls` that share the base class of its kind, such as `Norm`."""
    bases = [base for base in cls.__mro__ if issubclass(base, Configurable) and not vars(base).get("has_kinds")]
    room = next((room for base in bases for room in ROOMS if base.__module__.startswith(room + ".")), None)
    found = {each.__name__: each for each in _classes(room) if issubclass(each, bases[-1])} if room else {}
    if len(found) > 1:
        found.pop(bases[-1].__name__, None)
    return found | {name: each for each in found.values() if (name := vars(each).get("pax_name"))}


def is_of_another_class(config: fdl.Buildable, path: str) -> bool:
    """Whether a full path names no field of `config`, but a field of a class that could replace its parent.

    Raises:
      ConfigError: The path of the parent is unknown too, or is not a full path.
    """
    paths = {node.path for node in walk(config)}
    if path in paths:
        return False
    if path.partition(".")[0] not in paths:
        raise ConfigError(f"`{path}?` is not a full path.", f"Write `task.model.{path}?`, for example.")
    head, _, name = path.rpartition(".")
    if is_of_another_class(config, head):
        return True
    holder = find(config, head)[0]
    others = choices(holder.value, *(holder.declared or ()), *union_members(holder.annotation)).values()
    return any(name == field.name for other in others for field in dataclasses.fields(other))  # pyrefly: ignore


@functools.cache
def _classes(room: str) -> list[type]:
    found = []
    for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_complete = isinstance(value, type) and issubclass(value, Configurable) and not inspect.isabstract(value)
            if is_complete and value.__module__ == module.name and not name.startswith("_"):
                found.append(value)
    return found
