"""Sets one value in a config, checked against the type and range of its field."""

from __future__ import annotations

import collections.abc
import contextlib
import enum
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any

import fiddle as fdl
import numpy as np
import yaml

from paxcli.config.classes import choices, class_of
from paxcli.config.fields import Mark, annotation_of, marks_of, union_members
from paxcli.config.tree import Node, check_range, find_all, walk
from paxcli.config.yaml_text import parse_yaml
from paxcli.errors import ConfigError, did_you_mean

_SCALARS = (bool, int, str, types.NoneType)


class Text(str):
    """A value as typed on the command line: YAML, except that a string field takes the text unchanged."""


class _Mismatch(Exception):
    def __init__(self, expected: str, names: collections.abc.Iterable[str] = ()):
        super().__init__(expected)
        self.expected = expected
        self.names = tuple(names)


def assign(config: fdl.Buildable, path: str, value: Any) -> list[str]:
    """Sets the field that `path` names in `config` to `value` and returns the full paths of all that it sets.

    A field that holds a layer, an optimizer, a schedule or an input takes the name of another such class of pax, which
    is then created with its defaults, except for fields that keep their values, such as an input's tokenizer. A
    tokenizer also takes a short form (`from_short_form`), which sets fields of the new object.

    Args:
      config: Changed in place.
      path: A full path, a suffix of one that is unique, or the name of a field of all inputs (`Mark.COMMON`).
      value: A plain value, or `Text` to parse by the type of the field.

    Raises:
      ConfigError: The path is unknown or ambiguous, or the value is not of the field's type or not in its range.
    """
    return assign_in(walk(config), path, value)


def assign_in(nodes: collections.abc.Sequence[Node], path: str, value: Any) -> list[str]:
    """As `assign`, for a config whose nodes are known (`walk`); they keep the old values."""
    nodes, item = find_all(nodes, path)
    given = _parse(value) if isinstance(value, Text) else value
    return [name for node in nodes for name in _assign(node, item, value, given)]


def _assign(node: Node, item: str | int | None, value: Any, given: Any) -> list[str]:
    name = node.path if item is None else f"{node.path}.{item}"
    with _explain_mismatch(name, str(value) if isinstance(value, Text) else given):
        if item is None:
            typed = _fit_text(value, given, node)
        else:
            typed = _fit(_with_item(node.value, item, given), _type(node), node)
    check_range(node.path, typed, node.annotation)
    _store(node, typed)
    held = class_of(typed) if isinstance(typed, fdl.Buildable) and isinstance(given, str) else None
    fields = typed.__arguments__ if held is not None and given not in choices(held) else ()
    return [name, *(f"{name}.{field}" for field in fields)]


def _store(node: Node, value: Any) -> None:
    if isinstance(node.parent, fdl.Buildable):
        setattr(node.parent, str(node.key), value)
    else:
        node.parent[node.key] = value


def fit_types(config: fdl.Buildable) -> None:
    """Converts texts that were set in Python as `assign` does, such as the name of a class, or one text for a list.

    Raises:
      ConfigError: A field does not take its value.
    """
    for node in walk(config):
        kinds = {type(node.value), node.declared[0] if node.declared else None}
        if kinds == {fdl.Config, fdl.Partial} and class_of(node.value):
            wrong, right = ("partial", "config") if isinstance(node.value, fdl.Partial) else ("config", "partial")
            raise ConfigError(f"{node.path} is made by `.{wrong}(…)`.", f"Make it by `.{right}(…)`.")
        if node.is_shown:
            value = node.value.item() if isinstance(node.value, np.generic) else node.value
            is_config, part = isinstance(value, fdl.Buildable), class_of(value)
            right = "partial" if node.declared and node.declared[0] is fdl.Partial else "config"
            hint = f"Make it by `{part.__name__}.{right}(…)`." if part and not is_config else None
            with _explain_mismatch(node.path, part or (fdl.get_callable(value) if is_config else value), hint):
                fitted = _fit(value, _type(node), node)
            if isinstance(value, str) and fitted != value:
                _store(node, fitted)


@contextlib.contextmanager
def _explain_mismatch(path: str, value: Any, hint: str | None = None) -> Iterator[None]:
    try:
        yield
    except _Mismatch as mismatch:
        hint = hint or did_you_mean(str(value), mismatch.names) or "Give a value of that type."
        raise ConfigError(f"{path}: expected {mismatch.expected}, got {value!r}.", hint) from None


def split_assignment(text: str) -> tuple[str, Text]:
    """Splits `PATH=VALUE`."""
    path, equals, value = text.partition("=")
    if not path.strip() or not equals or not value.strip():
        hint = "For example `--set num_layers=4`. `null` turns a field off."
        raise ConfigError(f"`--set {text}` is not PATH=VALUE.", hint)
    return path.strip(), Text(value.strip())


def _parse(text: Text) -> Any:
    if text == "None":  # as in Python
        return None
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        return str(text)


def _fit_text(value: Any, given: Any, node: Node) -> Any:
    try:
        return _fit(given, _type(node), node)
    except _Mismatch:
        if isinstance(value, Text) and not isinstance(given, str) and str in union_members(_type(node)):
            return str(value)
        raise


def _type(node: Node) -> Any:
    """The declared type of a field; where there is none, the type of its current value."""
    if node.annotation is Any and type(node.value) in (*_SCALARS, float) and node.value is not None:
        return type(node.value)
    return node.annotation


def _with_item(container: Any, key: str | int, value: Any) -> Any:
    if isinstance(key, int):
        return [value if index == key else old for index, old in enumerate(container)]
    return {**(container or {}), key: value}


def _fit(value: Any, annotation: Any, node: Node) -> Any:
    """Converts `value` to one of the types that `annotation` allows."""
    mismatches = []
    for member in union_members(annotation):
        try:
            return _fit_one(value, member, node)
        except _Mismatch as mismatch:
            mismatches.append(mismatch)
    expected = " or ".join(dict.fromkeys(mismatch.expected for mismatch in mismatches))
    raise _Mismatch(expected, [name for mismatch in mismatches for name in mismatch.names])


def _fit_one(value: Any, kind: Any, node: Node) -> Any:
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return _one_of(value, {str(arg): arg for arg in args})
    if origin in _SCALARS:
        return _require(value, type(value) is origin, "null" if origin is types.NoneType else origin.__name__)
    if origin is float:
        return _number(value)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return value if isinstance(value, origin) else _one_of(value, {str(m.value): m for m in origin})
    if origin in (list, tuple, collections.abc.Sequence):
        return _sequence(value, origin, args, node)
    if origin in (dict, collections.abc.Mapping):
        _require(value, isinstance(value, dict), "dict")
        key_type, item_type = args or (Any, Any)
        return {_fit(k, key_type, node): _fit(v, item_type, node) for k, v in value.items()}
    return _object(value, kind if origin is functools.partial else origin, node)


def _require(value: Any, fits: bool, expected: str) -> Any:
    if not fits:
        raise _Mismatch(expected)
    return value


def _one_of(value: Any, allowed: dict[str, Any]) -> Any:
    name = str(value).lower() if isinstance(value, bool) else str(value)
    if name not in allowed:
        raise _Mismatch(f"one of {', '.join(allowed)}", allowed)
    return allowed[name]


def _number(value: Any) -> float:
    """A float; YAML reads `1e-3` as a string."""
    try:
        return float(_require(value, isinstance(value, int | float | str) and not isinstance(value, bool), "float"))
    except (ValueError, OverflowError):
        raise _Mismatch("float") from None


def _sequence(value: Any, origin: Any, args: tuple[Any, ...], node: Node) -> Any:
    if isinstance(value, str) and args[:1] == (str,):  # `files=my.txt`
        value = [value]
    _require(value, isinstance(value, list | tuple), "list")
    if origin is tuple and args and args[-1] is not Ellipsis:
        _require(value, len(value) == len(args), f"list of {len(args)}")
        return tuple(_fit(item, arg, node) for item, arg in zip(value, args, strict=True))
    old = node.value if isinstance(node.value, list | tuple) else ()
    nodes = [node._replace(value=old[index]) if index < len(old) else node for index in range(len(value))]
    items = [_fit(item, args[0] if args else Any, own) for item, own in zip(value, nodes, strict=True)]
    return tuple(items) if origin is tuple else items


def _object(value: Any, kind: Any, node: Node) -> Any:
    """Converts a value whose type YAML does not have: a class name to a config, anything else unchanged."""
    declared_kind, declared = node.declared or (None, kind)
    held = class_of(node.value) or class_of(declared)
    if held is None:
        fits = kind is Any or not isinstance(kind, type) or isinstance(value, kind | fdl.Buildable)
        return _require(value, fits, getattr(kind, "__name__", str(kind)))
    if isinstance(value, fdl.Buildable):
        return value
    allowed = choices(node.value, declared) or {held.__name__: held}
    text = value if isinstance(value, str) else ""
    cls, fields = (allowed[text], {}) if text in allowed else held.from_short_form(text) or (None, {})
    if cls is None:
        names = [*sorted(allowed), *held.short_forms]
        raise _Mismatch(f"one of {', '.join(names)}" if len(names) > 1 else names[0], allowed)
    present = type(node.value) if isinstance(node.value, fdl.Buildable) else declared_kind
    templates = (functools.partial, collections.abc.Callable)
    is_template = present is fdl.Partial or (present is None and (typing.get_origin(kind) or kind) in templates)
    old = fdl.ordered_arguments(node.value) if isinstance(node.value, fdl.Buildable) else {}
    fields |= {str(name): kept for name, kept in old.items() if Mark.COMMON in marks_of(annotation_of(cls, name))}
    return cls.partial(**fields) if is_template else cls.config(**fields)
