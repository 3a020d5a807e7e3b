"""YAML of users, parsed in bounded time and memory."""

from __future__ import annotations

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
        node = loader.get_single_node()
        if node is None:
            return None
        _Checker().check(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(f"nested more than {_MAX_DEPTH} levels deep") from None
    finally:
        loader.dispose()


class _Checker:
    """Walks a document as if its aliases were copies."""

    def __init__(self) -> None:
        self._values = 0
        self._above: list[yaml.Node] = []

    def check(self, node: yaml.Node) -> None:
        """Raises a MarkedYAMLError at the first value that is refused."""
        self._values += 1
        if self._values > _MAX_VALUES:
            raise _error(node, f"more than {_MAX_VALUES:,} values, with aliases expanded")
        if any(node is above for above in self._above):
            raise _error(node, "an alias refers to a value that contains it")
        if len(self._above) > _MAX_DEPTH:
            raise _error(node, f"nested more than {_MAX_DEPTH} levels deep")
        self._above.append(node)
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            for _, value in node.value:
                self.check(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.check(item)
        elif node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MAX_DIGITS:
            raise _error(node, f"a number of {len(node.value)} digits")
        self._above.pop()

    def _check_keys(self, node: yaml.MappingNode) -> None:
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
