"""What a model will really see of an input: its batches in numbers and in text, and what looks wrong with them."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paxcli.errors import DataError
from paxcli.inputs.base_input import BaseInput
from paxcli.inputs.nested_map import NestedMap

_RATE_SECONDS = 0.3


@dataclasses.dataclass
class Inspection:
    """Some batches of one input.

    Attributes:
      name: The input's name.
      batches: The batches.
      fields: Field → `shape` and `dtype` of a batch, `min` and `max` over all of them.
      rows: For each batch, for each row: its segments as text; padding is a segment of its own.
      padding_share: Share of positions that have no token; None where batches have no `weights`.
      segments_per_row: Mean number of documents, or parts of them, in a row; None without `segment_ids`.
      first_batch_seconds: How long the first batch took.
      rows_per_second: How fast this process alone can take rows, once the data is open.
      tokens_per_second: The same in positions of `ids`, if there are any.
      warnings: What is probably a mistake.
    """

    name: str
    batches: list[NestedMap]
    fields: dict[str, dict[str, Any]]
    rows: list[list[list[str]]]
    padding_share: float | None
    segments_per_row: float | None
    first_batch_seconds: float
    rows_per_second: float
    tokens_per_second: float | None
    warnings: list[str]

    def report(self) -> dict[str, Any]:
        """All but the batches themselves, as JSON can hold it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "batches"}


def inspect_batches(data: BaseInput, num_batches: int) -> Inspection:
    """Takes up to `num_batches` from `data` and describes them, then takes more to measure how fast it is."""
    began = time.perf_counter()
    batches = _take(data, 1)
    first_batch_seconds = time.perf_counter() - began
    if not batches:
        raise DataError(f"Input `{data.name}` has no batch.")
    batches += _take(data, num_batches - 1)
    weights = [batch["weights"] for batch in batches if "weights" in batch]
    segments = [batch["segment_ids"].max(axis=-1) for batch in batches if "segment_ids" in batch]
    rows_per_second = _rows_per_second(data)
    return Inspection(
        name=data.name or "",
        batches=batches,
        fields=_fields(batches),
        rows=[[_segments(data, batch, row) for row in range(_num_rows(batch))] for batch in batches],
        padding_share=float(np.mean(np.equal(weights, 0))) if weights else None,
        segments_per_row=float(np.mean(segments)) if segments else None,
        first_batch_seconds=first_batch_seconds,
        rows_per_second=rows_per_second,
        tokens_per_second=rows_per_second * batches[0]["ids"].shape[-1] if "ids" in batches[0] else None,
        warnings=_warnings(data, batches),
    )


def rows_of_several_hosts(makers: Sequence[Callable[[], BaseInput]], num_batches: int) -> int:
    """How many rows more than one host takes in its first batches: 0 when the data is shared out right.

    Args:
      makers: What makes the input of each host; called one after the other, so that one is in memory at a time.
      num_batches: How many batches each host takes.
    """
    if len(makers) == 1:
        return 0
    hosts: dict[bytes, set[int]] = collections.defaultdict(set)
    for host, make_input in enumerate(makers):
        for batch in _take(make_input(), num_batches):
            for row in range(_num_rows(batch)):
                if _has_weight(batch, row):
                    hosts[_digest(batch, row)].add(host)
    return sum(len(seen) > 1 for seen in hosts.values())


def _until_end(data: BaseInput) -> Iterator[NestedMap]:
    while True:
        try:
            batch = data.get_next()
        except StopIteration:
            return
        yield batch


def _take(data: BaseInput, count: int) -> list[NestedMap]:
    return list(itertools.islice(_until_end(data), count))


def _num_rows(batch: NestedMap) -> int:
    return len(next(iter(batch.values())))


def _has_weight(batch: NestedMap, row: int | slice) -> bool:
    return "weights" not in batch or bool(batch["weights"][row].any())


def _fields(batches: list[NestedMap]) -> dict[str, dict[str, Any]]:
    fields = {}
    for path, array in batches[0].flatten_items():
        arrays = [dict(batch.flatten_items())[path] for batch in batches]
        fields[path] = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "min": min(a.min().item() for a in arrays),
            "max": max(a.max().item() for a in arrays),
        }
    return fields


def _segments(data: BaseInput, batch: NestedMap, row: int) -> list[str]:
    """Text of a row of `ids`, cut where `segment_ids` change, with special tokens spelled out."""
    if "ids" not in batch:
        return []
    ids = batch["ids"][row]
    segment_ids = batch["segment_ids"][row] if "segment_ids" in batch else np.zeros_like(ids)
    borders = np.flatnonzero(np.diff(segment_ids)) + 1
    return [_text(data, part) for part in np.split(ids, borders)]


def _text(data: BaseInput, ids: np.ndarray) -> str:
    special = data.special_tokens()
    parts = []
    for name, group in itertools.groupby(ids.tolist(), key=special.get):
        run = list(group)
        if name is None:
            parts += data.ids_to_strings(np.array([run]), [len(run)])
        else:
            parts.append(name if len(run) == 1 else f"{name}×{len(run)}")
    return "".join(parts)


def _rows_per_second(data: BaseInput) -> float:
    began, rows, seconds = time.perf_counter(), 0, 0.0
    data.reset()
    for batch in _until_end(data):
        rows += _num_rows(batch)
        seconds = time.perf_counter() - began
        if seconds > _RATE_SECONDS:
            break
    return rows / seconds


def _warnings(data: BaseInput, batches: list[NestedMap]) -> list[str]:
    warnings = []
    whole = slice(None)
    counted = collections.Counter(_digest(batch, whole) for batch in batches if _has_weight(batch, whole))
    if repeated := sum(counted.values()) - len(counted):
        warnings.append(f"{repeated} of {len(batches)} batches repeat another one.")
    if empty := len(batches) - sum(counted.values()):
        warnings.append(f"In {empty} of {len(batches)} batches all weights are zero.")
    vocab_size = getattr(data, "vocab_size", None)
    largest = max((int(batch[key].max()) for batch in batches for key in ("ids", "labels") if key in batch), default=0)
    if vocab_size is not None and largest >= vocab_size:
        warnings.append(f"Ids go up to {largest}, but the model's vocab_size is {vocab_size}.")
    return warnings


def _digest(batch: NestedMap, row: int | slice) -> bytes:
    digest = hashlib.sha256()
    for _, array in batch.flatten_items():
        digest.update(np.ascontiguousarray(array[row]).data)
    return digest.digest()
