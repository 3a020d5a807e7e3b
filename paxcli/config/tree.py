"""A config as a list of paths, such as `task.model.num_layers`, with their values.

A template field that is not set and whose name an object above the template has too is *inherited*: the parent fills it
in when it creates a layer from the template. It has no value of its own, so it is neither shown nor assigned; users
assign the upper field.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import fiddle as fdl

from paxcli.config.configurable import EXPAND
from paxcli.config.fields import Mark, annotation_of, marks_of, out_of_range, union_members
from paxcli.config.names_elsewhere import field_of
from paxcli.errors import ConfigError, did_you_mean


class Node(NamedTuple):
    """One field or item of a config tree.

    Attributes:
      path: From the root, with dots.
      parent: The buildable, list or dict that contains it.
      key: Field name, index or key in `parent`.
      value: Its value; `fdl.NO_VALUE` for a required field without one.
      annotation: The declared type, with its facts (`fields.py`); `typing.Any` when none is known.
      is_set: Whether the recipe sets it, rather than the class default.
      in_template: Whether it is inside an `fdl.Partial`.
      inherits_from: Path of the upper field that fills this one in, if any.
      declared: For a field with a default sub-object, its kind (`fdl.Config` or `fdl.Partial`) and class.
    """

    path: str
    parent: Any
    key: str | int
    value: Any
    annotation: Any
    is_set: bool
    in_template: bool = False
    inherits_from: str | None = None
    declared: tuple[type, type] | None = None

    @property
    def is_gap(self) -> bool:
        """Whether the parent of the template fills this in."""
        return self.inherits_from is not None or (self.in_template and self.value is fdl.NO_VALUE)

    @property
    def is_shown(self) -> bool:
        """Whether this has a value of its own: it is neither a container of configs nor filled in by a parent."""
        return not self.is_gap and self.value is not fdl.NO_VALUE and not _holds_configs(self.value)


def walk(config: fdl.Buildable) -> list[Node]:
    """Every field and item below `config`, parents first, in field order."""
    return list(_walk_fields(config, "", {}, {}, isinstance(config, fdl.Partial)))


def find(config: fdl.Buildable, path: str) -> tuple[Node, str | int | None]:
    """Finds the field that `path` names: a full path, or a suffix of one that is unique. Case is ignored.

    Returns:
      The field, and None; or a field that holds plain items, and the key or index of one item.

    Raises:
      ConfigError: No field, or more than one, matches.
    """
    nodes, item = find_all(walk(config), path)
    return nodes[0], item


def find_all(nodes: Sequence[Node], path: str) -> tuple[list[Node], str | int | None]:
    """As `find`, among the nodes of `walk`, but with every field that matches, if all are `Mark.COMMON`."""
    matches = _matches(nodes, path)
    if len(matches) > 1 and all(map(_is_common, matches)):
        return matches, None
    if not matches and "." in path:
        head, _, last = path.rpartition(".")
        if holders := [(node, item) for node in _matches(nodes, head) if (item := _item_key(node, last)) is not None]:
            return [_only([node for node, _ in holders], head)], holders[0][1]
    return [_only(matches, path, nodes)], None


def is_common(nodes: Sequence[Node], path: str) -> bool:
    """Whether `path` is the name of a field that all inputs share (`Mark.COMMON`), not of that of one input."""
    return "." not in path and all(map(_is_common, find_all(nodes, path)[0]))


def check_range(path: str, value: Any, annotation: Any) -> None:
    """Raises a ConfigError when a number or a word of `value` is not among those that `annotation` allows."""
    if error := out_of_range(path, value, annotation):
        raise ConfigError(error, "Correct it in the recipe, the overlay or the `--set` that sets it.")


def check_one_is_set(owner: Any, one: str, other: str, example: str) -> None:
    """Raises a ConfigError unless one of two fields of `owner` is None and the other is not."""
    given = [f"`{name}` ({value})" for name in (one, other) if (value := getattr(owner, name)) is not None]
    if len(given) != 1:
        problem = f"Both {' and '.join(given)} are set." if given else f"Neither `{one}` nor `{other}` is set."
        raise ConfigError(problem, f"Set one of them, for example `--set {example}`, and the other to null.")


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


def _is_common(node: Node) -> bool:
    return Mark.COMMON in marks_of(node.annotation)


def _walk_fields(
    owner: fdl.Buildable, prefix: str, outer: Mapping[str, str], defaults: Mapping[str, Any], in_template: bool
) -> Iterator[Node]:
    function, given = fdl.get_callable(owner), owner.__arguments__
    declared = _default_objects(function)
    names_below = {**{name: prefix + name for name in owner.__signature_info__.parameters}, **outer}
    for name, value in _values(owner).items():
        child_defaults = _expanded_defaults(declared.get(name), defaults.get(name), value)
        is_set = name in given and child_defaults is None and value != defaults.get(name, _class_default(owner, name))
        node = Node(
            path=prefix + name,
            parent=owner,
            key=name,
            value=value,
            annotation=annotation_of(function, name),
            is_set=is_set,
            in_template=in_template,
            inherits_from=outer.get(name) if in_template and not is_set else None,
            declared=declared[name][:2] if name in declared else None,
        )
        yield from _walk_node(node, names_below, child_defaults or {})


def _walk_node(node: Node, outer: Mapping[str, str], defaults: Mapping[str, Any]) -> Iterator[Node]:
    yield node
    if node.inherits_from:
        return
    if isinstance(node.value, fdl.Buildable):
        in_template = node.in_template or isinstance(node.value, fdl.Partial)
        yield from _walk_fields(node.value, node.path + ".", outer, defaults, in_template)
    elif _holds_configs(node.value):
        for key, item in _items(node.value):
            child = Node(f"{node.path}.{key}", node.value, key, item, Any, node.is_set, node.in_template)
            yield from _walk_node(child, outer, {})


def _values(owner: fdl.Buildable) -> dict[str, Any]:
    """Field → value, with the defaults of unset fields and without the fields that Flax adds to a module."""
    function = fdl.get_callable(owner)
    values = fdl.ordered_arguments(owner, include_defaults=True, include_unset=True)
    values |= {name: _class_default(owner, str(name)) for name in values.keys() - owner.__arguments__.keys()}
    is_module = any(base.__module__.startswith("flax.linen") for base in getattr(function, "__mro__", ()))
    added = {"parent", "name"} - owner.__arguments__.keys() if is_module else ()
    return {str(name): value for name, value in values.items() if name not in added}


def _class_default(owner: fdl.Buildable, name: str) -> Any:
    field = _fields(fdl.get_callable(owner)).get(name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    parameter = owner.__signature_info__.parameters.get(name)
    return fdl.NO_VALUE if parameter is None or parameter.default is parameter.empty else parameter.default


def _expanded_defaults(declared: tuple | None, outer_default: Any, value: Any) -> Mapping[str, Any] | None:
    """The fields that the class sets on its default sub-object, if `value` still is that default."""
    if not isinstance(value, fdl.Buildable):
        return None
    if isinstance(outer_default, fdl.Buildable) and fdl.get_callable(outer_default) is fdl.get_callable(value):
        return outer_default.__arguments__  # type: ignore[return-value]
    kind, cls, fields = declared or ((), None, {})
    return fields if isinstance(value, kind) and fdl.get_callable(value) is cls else None


@functools.cache
def _fields(function: Any) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(function)} if dataclasses.is_dataclass(function) else {}


@functools.cache
def _default_objects(function: Any) -> dict[str, tuple[type, type, Mapping[str, Any]]]:
    """Kind, class and fields of the default sub-object of each field that has one."""
    return {name: field.metadata[EXPAND] for name, field in _fields(function).items() if EXPAND in field.metadata}


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, list | tuple) else []


def _holds_configs(value: Any) -> bool:
    return any(isinstance(item, fdl.Buildable) or _holds_configs(item) for _, item in _items(value))


def _item_key(node: Node, text: str) -> str | int | None:
    """The key of the item that `text` names in a plain list or dict at `node`."""
    if isinstance(node.value, list | tuple):
        return int(text) if text.isdecimal() and int(text) < len(node.value) else None
    types_of_value = [typing.get_origin(member) or member for member in union_members(node.annotation)]
    return text if isinstance(node.value, dict) or (node.value is None and dict in types_of_value) else None


def _matches(nodes: Iterable[Node], path: str) -> list[Node]:
    wanted = path.lower()
    found: dict[tuple[int, Any], Node] = {}
    for node in nodes:
        if node.path.lower() == wanted:
            return [node]
        if node.path.lower().endswith("." + wanted):
            found.setdefault((id(node.parent), node.key), node)
    own = [node for node in found.values() if not node.is_gap]
    return [node for node in own if Mark.DERIVED not in marks_of(node.annotation)] or own or list(found.values())


def _only(matches: list[Node], path: str, nodes: Iterable[Node] = ()) -> Node:
    if not matches:
        raise ConfigError(f"This recipe has no field `{path}`.", _suggestion(path, nodes))
    if len(matches) > 1:
        field = field_of(path)
        hint = f"Did you mean `{field}`? Otherwise write more of the path." if field else "Write more of the path."
        raise ConfigError(f"`{path}` is ambiguous: {', '.join(f'`{node.path}`' for node in matches)}.", hint)
    if matches[0].inherits_from:
        upper = matches[0].inherits_from
        raise ConfigError(f"`{matches[0].path}` is filled in from `{upper}`.", f"Set `{upper}` instead.")
    if matches[0].in_template and matches[0].value is fdl.NO_VALUE:
        raise ConfigError(f"`{matches[0].path}` is filled in when the template is used.", "Set the model's widths.")
    return matches[0]


def _suggestion(path: str, nodes: Iterable[Node]) -> str:
    paths = [node.path for node in nodes if node.inherits_from is None]
    if (field := field_of(path.rpartition(".")[2])) and any(f".{p}".endswith(f".{field}") for p in paths):
        return f"Did you mean `{field}`?"
    for wanted, parts in ((path, path.count(".") + 1), (path.rpartition(".")[2], 1)):
        if hint := did_you_mean(wanted, dict.fromkeys(".".join(p.split(".")[-parts:]) for p in paths)):
            return hint
    return "`pax recipes show` lists the fields of a recipe."
