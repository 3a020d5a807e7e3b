"""The manifest of a checkpoint: shape, dtype and fingerprint of each array, and the input's position."""

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
    """The metadata of a checkpoint.

    Args:
      step: Number of completed steps.
      arrays: By dotted name, such as `params.stack.layers.feed_forward.w_in`.
      input_states: One per process, or a single one if they are all equal.
    """

    step: int
    arrays: dict[str, ArrayEntry]
    input_states: list[dict[str, Any]]


def describe_state(step: int, arrays: Mapping[str, Any], input_states: list[dict[str, Any]]) -> Manifest:
    """Builds the manifest of a state."""
    prints = fingerprints(arrays)
    entries = {name: ArrayEntry(tuple(x.shape), str(x.dtype), prints[name]) for name, x in arrays.items()}
    return Manifest(step, entries, input_states)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """A JSON object with a checksum of its content."""
    content = {"format": FORMAT, **dataclasses.asdict(manifest)}
    return {"checksum": _checksum(content), "content": content}


def from_json(saved: Any) -> Manifest:
    """The inverse of `to_json`.

    Raises:
      DataError: The checksum is wrong, or the format is of another version of pax.
    """
    content = saved.get("content") if isinstance(saved, dict) else None
    if not isinstance(content, dict) or saved.get("checksum") != _checksum(content):
        raise DataError("its manifest is damaged")
    if content["format"] != FORMAT:
        raise DataError(f"its format is {content['format']}, and this version of pax reads format {FORMAT}")
    arrays = {
        name: ArrayEntry(tuple(entry["shape"]), entry["dtype"], entry["fingerprint"])
        for name, entry in content["arrays"].items()
    }
    return Manifest(content["step"], arrays, content["input_states"])


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
