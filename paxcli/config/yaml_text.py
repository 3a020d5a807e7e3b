"""YAML of users, parsed in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_MAX_DEPTH = 50
_MAX_VALUES = 100_000  # after the expansion of aliases
_MAX_DIGITS = 100


def parse_yaml(text: str) -> Any:
    """The plain values of a YAML document.

    Raises:
      yaml.YAMLError: The text is not YAML, a key occurs twice or is not a plain name, or the document nests too deep,
        contains itself, or expands to too many values. Errors with a line are a `yaml.MarkedYAMLError`.
      ValueError: A date that does not exist.
    """
    loader = yaml.SafeLoader(text)
    try:
        if (node := loader.get_single_node()) is None:
            return None
        _check(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(f"nested more than {_MAX_DEPTH} levels deep") from None
    finally:
        loader.dispose()


def _check(document: yaml.Node) -> None:
    """Raises a MarkedYAMLError at the first value that is refused."""
    for number, node in enumerate(_values(document, ()), start=1):
        if number > _MAX_VALUES:
            raise _error(node, f"more than {_MAX_VALUES:,} values, with aliases expanded")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        elif node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MAX_DIGITS:
            raise _error(node, f"a number of {len(node.value)} digits")
        elif node.tag == "tag:yaml.org,2002:int" and re.fullmatch("[-+]?0[0-9_]+", node.value):
            raise _error(node, f"{node.value} begins with 0, so YAML takes it for an octal number")


def _values(node: yaml.Node, above: tuple[yaml.Node, ...]) -> Iterator[yaml.Node]:
    """A value and all below it, as if aliases were copies."""
    if any(node is each for each in above):
        raise _error(node, "an alias refers to a value that contains it")
    if len(above) > _MAX_DEPTH:
        raise _error(node, f"nested more than {_MAX_DEPTH} levels deep")
    yield node
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            yield from _values(item[1] if isinstance(item, tuple) else item, (*above, node))


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuses keys that are not names, and equal keys: YAML itself silently takes the last of them."""
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(key, "a key is not a name")
        if key.value in seen:
            raise _error(key, f"`{key.value}` occurs twice")
        seen.add(key.value)


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
