"""Resolves recipe, overlays and `--set` into one config, with the source of each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fiddle as fdl

from paxcli.config.assign import assign, assign_in, fit_types, split_assignment
from paxcli.config.classes import is_of_another_class
from paxcli.config.load import load
from paxcli.config.overlay import OPTIONAL, YAML_SUFFIXES, Assignments, read_overlay
from paxcli.config.paths import resolve_path
from paxcli.config.tree import Node, find_all, is_common, walk
from paxcli.config.values import plain, plain_values
from paxcli.errors import ConfigError

# Pairs of mutually exclusive fields. Setting one in a later source sets the other, from an earlier source, to None.
RIVALS = {"global_batch_size": "percore_batch_size", "num_microbatches": "microbatch_size"}
RIVALS |= {"num_train_steps": "num_train_epochs"}
RIVALS |= {other: one for one, other in RIVALS.items()}


class SourcedValue(NamedTuple):
    """A plain value and its source: `default`, `recipe`, `overlay NAME` or `--set`.

    The value of a sub-config is its class name, and `is_config` is true.
    """

    value: Any
    source: str
    is_config: bool = False


class Resolved(NamedTuple):
    """A recipe as it will run.

    Attributes:
      name: The recipe's name.
      pax_name: The experiment class of Pax that computes the same, if any.
      target: The argument that loads the base recipe from any directory.
      overlays: The overlays, by name or full path.
      sets: The `--set` assignments: full path → plain value.
      config: The complete config.
      values: Path → value, in tree order.
    """

    name: str
    pax_name: str | None
    target: str
    overlays: tuple[str, ...]
    sets: dict[str, Any]
    config: fdl.Config
    values: dict[str, SourcedValue]


def resolve(target: str, overlays: Sequence[str] = (), sets: Sequence[str] | Mapping[str, Any] = ()) -> Resolved:
    """Loads a recipe and applies overlays, in order, and then `sets`.

    Args:
      target: The recipe, as `load` takes it.
      overlays: Names or files of overlays.
      sets: `PATH=VALUE` texts, or a mapping of paths to plain values.

    Raises:
      ConfigError: A path or name is unknown or ambiguous, or a value has the wrong type, is out of range or missing.
    """
    given = sets if isinstance(sets, Mapping) else parse_assignments(sets)
    layers = [*map(read_overlay, overlays), Assignments("--set", given)]
    loaded = load(target)
    config = loaded.config
    sources: dict[str, str] = {}
    set_paths: list[str] = []
    for assignments in (*loaded.assignments, *layers):
        set_paths = _apply(config, assignments, sources)
    fit_types(config)
    nodes = walk(config)
    # Required fields without a value, which would make the build fail.
    if missing := [node.path for node in nodes if node.value is fdl.NO_VALUE and not node.in_template]:
        raise ConfigError(f"{loaded.name}: `{missing[0]}` has no value.", f"Give it one: `--set {missing[0]}=…`.")
    return Resolved(
        name=loaded.name,
        pax_name=loaded.pax_name,
        target=loaded.target,
        overlays=tuple(str(resolve_path(o)) if Path(o).suffix in YAML_SUFFIXES else o for o in overlays),
        sets={path: _plain_at(nodes, path) for path in set_paths},
        config=config,
        values=_with_sources(config, nodes, sources),
    )


def parse_assignments(sets: Sequence[str]) -> dict[str, Any]:
    """`PATH=VALUE` texts as a mapping of paths to values, which the type of each field reads."""
    values: dict[str, Any] = {}
    for path, value in map(split_assignment, sets):
        if path in values:
            raise ConfigError(f"`--set {path}` is given twice.", "Keep one.")
        values[path] = value
    return values


def _apply(config: fdl.Config, assignments: Assignments, sources: dict[str, str]) -> list[str]:
    """Applies the assignments of one source, records it in `sources`, and returns their full paths."""
    source = assignments.source
    done: dict[str, bool] = {}  # full path -> whether it was set with the others of `common`
    common: dict[str, Any] = {}  # for every input, also one that a later assignment creates
    for path, value in assignments.values.items():
        try:
            if path.endswith(OPTIONAL) and is_of_another_class(config, path.removesuffix(OPTIONAL)):
                continue
            path = path.removesuffix(OPTIONAL)
            nodes = walk(config)
            of_all_inputs = is_common(nodes, path)
            paths = assign_in(nodes, path, value)
            again = _assign_again(config, common, paths)
        except ConfigError as error:
            raise ConfigError(("" if source == "--set" else f"{source}: ") + error.message, error.hint) from None
        for full in paths:
            if full in done:
                raise ConfigError(f"{source} sets `{full}` twice, the second time as `{path}`.", "Keep one.")
            for below in [old for old in sources if old.startswith(full + ".")]:
                if not done.pop(below, True):
                    raise ConfigError(f"{source} sets `{full}` after `{below}`, which is part of it.", "Set it before.")
                del sources[below]
        if of_all_inputs:
            common[path] = value
        sources |= dict.fromkeys([*paths, *again], source)
        done |= dict.fromkeys(paths, of_all_inputs) | dict.fromkeys(again, True)
    for full in done:
        rival = _rival(config, full)
        if rival and rival not in done:
            assign(config, rival, None)
            sources[rival] = source
    return list(done)


def _assign_again(config: fdl.Config, common: Mapping[str, Any], changed: Sequence[str]) -> list[str]:
    """Sets the fields that all inputs share in the inputs that `changed` has made; returns the paths of all it sets."""
    nodes = [(node, value) for name, value in common.items() for node in find_all(walk(config), name)[0]]
    made = [(node.path, value) for node, value in nodes if node.path.startswith(tuple(f"{path}." for path in changed))]
    return [path for name, value in made for path in assign(config, name, value)]


def _rival(config: fdl.Config, path: str) -> str | None:
    """The field that must become None because `path` has a value."""
    head, _, name = path.rpartition(".")
    if name not in RIVALS:
        return None
    rival, values = f"{head}.{RIVALS[name]}", {node.path: node.value for node in walk(config)}
    return rival if values.get(path) is not None and values.get(rival) is not None else None


def _plain_at(nodes: Sequence[Node], path: str) -> Any:
    (node, *_), item = find_all(nodes, path)
    return plain(node.value if item is None else node.value[item])


def _with_sources(config: fdl.Config, nodes: Sequence[Node], sources: dict[str, str]) -> dict[str, SourcedValue]:
    values = plain_values(config)
    return {
        node.path: SourcedValue(values[node.path], _source(node, sources), isinstance(node.value, fdl.Buildable))
        for node in nodes
        if node.path in values
    }


def _source(node: Node, sources: dict[str, str]) -> str:
    """The source that last set this field, or an item of it."""
    is_config = isinstance(node.value, fdl.Buildable)
    own = {node.path} if is_config else {node.path, *(path for path in sources if path.startswith(node.path + "."))}
    by_layer = [source for path, source in sources.items() if path in own]
    return by_layer[-1] if by_layer else "recipe" if node.is_set else "default"
