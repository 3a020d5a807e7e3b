"""Finds the commands of containers in a Kubernetes manifest, such as that of a Job or a JobSet."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

_MAX_DEPTH = 40


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
    if depth > _MAX_DEPTH or not isinstance(node, dict | list):
        return []
    if isinstance(node, list):
        return [command for item in node for command in _commands(item, depth + 1)]
    words = [str(word) for key in ("command", "args") if isinstance(node.get(key), list) for word in node[key]]
    own = [shlex.join(words)] if words else []
    return own + [command for value in node.values() for command in _commands(value, depth + 1)]
