"""The manifest of a checkpoint: shape, dtype and fingerprint of each array, the inputs' positions, and the recipe."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax

from paxcli.errors import DataError

FORMAT = 3
MANIFEST_FILE = "metadata"  # as Orbax names a file of JSON
_FIRST = 1  # version 0.1.0, which recorded neither the recipe nor the positions of eval inputs

InputState = dict[str, Any]  # positions of the inputs of a process, by split
Recipe = Mapping[str, Any]  # path → plain value


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    fingerprint: int

    def abstract(self, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        """Its shape and dtype, and a sharding to read it with."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The metadata of a checkpoint.

    Args:
      step: Number of completed steps.
      arrays: By dotted name, such as `params.stack.layers.feed_forward.w_in`.
      input_states: Positions of the inputs by split (`train`, `eval/NAME`), and `evaluated`: whether those of eval
        inputs are after the evaluation of this step. One mapping per process, or a single one if they are all equal.
      recipe: Path → plain value of the run's resolved recipe, seeds included; empty if it was not recorded.
    """

    step: int
    arrays: dict[str, ArrayEntry]
    input_states: list[InputState]
    recipe: Recipe


def describe_arrays(arrays: Mapping[str, Any], fingerprints: Mapping[str, int]) -> dict[str, ArrayEntry]:
    """The entries of arrays in a manifest."""
    return {name: ArrayEntry(tuple(x.shape), str(x.dtype), fingerprints[name]) for name, x in arrays.items()}


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
    if content.get("format") not in (FORMAT, _FIRST):
        raise DataError(f"its format is {content.get('format')}, and this version of pax reads format {FORMAT}")
    try:
        recipe = {} if content["format"] == _FIRST else content["recipe"]
        items = content["arrays"].items()
        arrays = {name: ArrayEntry(tuple(x["shape"]), x["dtype"], x["fingerprint"]) for name, x in items}
        manifest = Manifest(content["step"], arrays, content["input_states"], recipe)
        if not _is_well_formed(manifest):
            raise TypeError("a part has the wrong type")
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError("its manifest is damaged: a part is missing or has the wrong type") from error
    if content["format"] == _FIRST:
        by_split = [{"train": state} if state else {} for state in manifest.input_states]
        manifest = dataclasses.replace(manifest, input_states=by_split)
    return manifest


def _is_well_formed(manifest: Manifest) -> bool:
    entries, states = manifest.arrays.values(), manifest.input_states
    numbers = [manifest.step, *(number for entry in entries for number in (*entry.shape, entry.fingerprint))]
    kinds = ((int, numbers), (str, [entry.dtype for entry in entries]), (dict, [manifest.recipe, *states]))
    have_kinds = all(isinstance(value, kind) for kind, values in kinds for value in values)
    return have_kinds and isinstance(states, list) and bool(states)


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
