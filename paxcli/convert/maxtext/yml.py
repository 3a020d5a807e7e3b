"""Reads MaxText's `.yml` files, with the keys that they inherit from `base_config`, and Kubernetes manifests."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch import Diagnostic, Launch, Pair
from paxcli.errors import ConfigError

BASE = "base.yml"
_DEEPEST = 40
_LARGEST = 1 << 19


def read_yml(text: str, path: Path) -> Launch:
    """The keys of a config and of the configs that it inherits, its own last.

    MaxText's own base.yml is not needed: the defaults by date replace it.

    Raises:
      ConfigError: It is not a mapping of keys to values, or inherits itself.
    """
    launch = Launch(1, config=path.name)
    launch.pairs = _read_with_base(text, path, (), launch.diagnostics)
    if not launch.pairs:
        raise ConfigError(f"{path} sets no key.", "A MaxText config has lines such as `steps: 10`.")
    # The file of a model, whose name decides about parts of it that have no key.
    if path.stem in tables.table("models") and all(pair.key != "model_name" for pair in launch.pairs):
        launch.pairs.insert(0, Pair("model_name", path.stem, 1))
    return launch


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      ConfigError: It does not exist, is empty, too large, or not text.
    """
    try:
        if path.stat().st_size > _LARGEST:
            hint = "Name another file."
            raise ConfigError(f"{path} is too large for a launch script: {path.stat().st_size:,} bytes.", hint)
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.", "Name a script, a .yml, or `--model`.") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text or not text.strip():
        problem = "is empty" if not text.strip() else "is not a text file"
        raise ConfigError(f"{path} {problem}.", "Name a launch script or a .yml.")
    return text


def find_beside(path: Path, name: str) -> Path | None:
    """Finds a file that `path` refers to: by its name beside it or one directory up, or by its path from a parent."""
    last = name.replace("\\", "/").rpartition("/")[2]
    if not last or last in (".", ".."):
        return None
    near = path.resolve()
    above = (parent / name.lstrip("/") for parent in near.parents)
    candidates = [near.parent / last, *above, near.parent.parent / last]
    try:
        return next((found for found in candidates if found.is_file() and found != near), None)
    except (OSError, ValueError):  # not a valid file name
        return None


def _read_with_base(text: str, path: Path, inside: tuple[Path, ...], reports: list[Diagnostic]) -> list[Pair]:
    if path.resolve() in inside or len(inside) > _DEEPEST:
        raise ConfigError(f"{path} inherits itself.", "Name another file in its `base_config`.")
    own = _pairs(text, path)
    base = next((pair for pair in own if pair.key == "base_config"), None)
    rest = [pair for pair in own if pair.key != "base_config"]
    if base is None or base.value in ("", "null"):
        return rest
    if (beside := find_beside(path, base.value)) is not None:
        given = {pair.key for pair in rest}
        below = _read_with_base(read_text(beside), beside, (*inside, path.resolve()), reports)
        if beside.name == BASE:  # has every key, most of which a recipe does not depend on
            used = {*tables.part("defaults"), *tables.part("aliases")}
            below = [pair for pair in below if pair.key in used]
        return [pair for pair in below if pair.key not in given] + rest
    if base.value.rpartition("/")[2] != BASE:
        reports.append(Diagnostic(base.line, f"base_config: {base.value}", "this file was not found"))
    return rest


def _pairs(text: str, path: Path) -> list[Pair]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        named = [*_items(root)] if isinstance(root, yaml.MappingNode) else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}.", "Fix its syntax.") from None
    if named is None:
        raise ConfigError(f"{path} is not a mapping of keys to values.", "Write one `key: value` on each line.")
    own = path.stem in tables.table("models")  # the keys of a model override those of other configs
    return [Pair(key, _value(value), value.start_mark.line + 1, in_config=not own) for key, value in named]


def _items(node: yaml.MappingNode, group: str = "") -> Iterator[tuple[str, yaml.Node]]:
    """Keys and values; those of a mapping in it as `group.key`, as on a command line."""
    named = [(f"{group}{key.value}", value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    for key, value in named:
        yield from _items(value, f"{key}.") if isinstance(value, yaml.MappingNode) else [(key, value)]


def _value(node: yaml.Node) -> str:
    """A value as on a command line."""
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag.endswith(":null") else node.value
    return f"[{','.join(map(_value, node.value if isinstance(node, yaml.SequenceNode) else []))}]"


def commands_in_manifest(text: str) -> list[str] | None:
    """The commands as shell scripts; None if the text is not a Kubernetes manifest."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not any({"apiVersion", "kind"} <= document.keys() for document in documents):
        return None
    return [command for document in documents for command in _commands(document, 0)]


def _commands(node: Any, depth: int) -> list[str]:
    if depth > _DEEPEST or not isinstance(node, dict | list):
        return []
    if isinstance(node, list):
        return [command for item in node for command in _commands(item, depth + 1)]
    words = [str(word) for key in ("command", "args") if isinstance(node.get(key), list) for word in node[key]]
    own = [shlex.join(words)] if words else []
    return own + [command for value in node.values() for command in _commands(value, depth + 1)]
