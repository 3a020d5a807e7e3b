"""What a checkpoint says of itself: its arrays with their shapes and fingerprints, and the state of the input."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

from paxcli.checkpoint.fingerprint import fingerprints
from paxcli.errors import DataError

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint but its arrays' values.

    Args:
      arrays: By dotted name, such as `params.decoder.layers.mlp.kernel`.
      input_states: One for all processes when they agree, else one for each.
    """

    step: int
    arrays: dict[str, ArrayEntry]
    input_states: list[dict[str, Any]]


def describe_state(step: int, arrays: Mapping[str, Any], input_states: list[dict[str, Any]]) -> Manifest:
    """The manifest of a state that is about to be saved."""
    prints = fingerprints(arrays)
    entries = {name: ArrayEntry(tuple(x.shape), str(x.dtype), prints[name]) for name, x in arrays.items()}
    return Manifest(step, entries, input_states)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """As a JSON object that carries its own checksum."""
    content = {"format": FORMAT, **dataclasses.asdict(manifest)}
    return {"checksum": _checksum(content), "content": content}


def from_json(saved: Any) -> Manifest:
    """The inverse of `to_json`.

    Raises:
      DataError: It was not written by pax, or was changed since.
    """
    content = saved.get("content") if isinstance(saved, dict) else None
    if not isinstance(content, dict) or saved.get("checksum") != _checksum(content):
        raise DataError("its manifest is damaged")
    if content["format"] != FORMAT:
        raise DataError(f"it has format {content['format']}, and this pax reads format {FORMAT}")
    arrays = {
        name: ArrayEntry(tuple(entry["shape"]), entry["dtype"], entry["fingerprint"])
        for name, entry in content["arrays"].items()
    }
    return Manifest(content["step"], arrays, content["input_states"])


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
