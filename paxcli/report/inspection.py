"""Inspects the batches that a model gets from an input: statistics, decoded text and warnings."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paxcli.errors import DataError
from paxcli.inputs.base_input import BaseInput
from paxcli.nested_map import NestedMap, digest, num_rows

Leaves = dict[str, np.ndarray]  # a batch: dotted path of each field to its array

_RATE_SECONDS = 0.3
_LENGTH_BINS = 8
_ROW_WEIGHTS = "eval_sample_weights"


@dataclasses.dataclass
class Inspection:
    """Statistics of some batches of one input.

    Fields of a nested batch are named by their dotted paths. A text field is `ids`, or a field such as `source_ids`
    with its own `source_segment_ids`.

    Attributes:
      name: The input's name.
      batches: The batches.
      fields: Field → `shape` and `dtype` of a batch, `min` and `max` over all batches (None if not numeric).
      rows: For each batch and each row: text field → its decoded segments, including padding. Without text fields, the
        row's integers, such as its label. Where some tokens have no loss, ⟦ ⟧ enclose those that have.
      weights: Weight field → fraction of positions with a nonzero weight.
      padding_share: Fraction of padding among the positions of text fields, or else of weights; None without either.
      lengths: Histogram of the lengths of segments, without padding: bins as `first`, `last` (tokens) and `segments`.
      segments_per_row: Mean number of documents, or parts of documents, per row of text; None without segments.
      first_batch_seconds: Time until the first batch.
      rows_per_second: Throughput of this process alone, after the first batch.
      tokens_per_second: The same in positions of text fields, if there are any.
      warnings: Probable mistakes in the data or the configuration.
      shared_rows: Number of rows that the batches of several hosts have in common.
    """

    name: str
    batches: list[NestedMap]
    fields: dict[str, dict[str, Any]]
    rows: list[list[dict[str, list[str]]]]
    weights: dict[str, float]
    padding_share: float | None
    lengths: list[dict[str, int]]
    segments_per_row: float | None
    first_batch_seconds: float
    rows_per_second: float
    tokens_per_second: float | None
    warnings: list[str]
    shared_rows: int = 0

    def report(self) -> dict[str, Any]:
        """All fields except the batches, serializable as JSON."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "batches"}


def inspect_batches(data: BaseInput, num_batches: int, vocab_size: int | None = None) -> Inspection:
    """Reads up to `num_batches` from `data` and describes them, then reads more to measure the throughput.

    Args:
      data: The input.
      num_batches: Number of batches to describe.
      vocab_size: The model's vocabulary size. None: the input's, if it has one.
    """
    began = time.perf_counter()
    batches = _take(data, 1)
    first_batch_seconds = time.perf_counter() - began
    if not batches:
        raise DataError(f"Input `{data.name}` has no batches.", "Check that its files hold a batch.")
    batches += _take(data, num_batches - 1)
    leaves = [dict(batch.flatten_items()) for batch in batches]
    texts = _text_fields(leaves[0])
    segments = [path for path in (_companion(text, "segment_ids") for text in texts) if path in leaves[0]]
    counts = [batch[path].max(axis=-1).ravel() for batch in leaves for path in segments]
    rows_per_second = _measure_rows_per_second(data)
    return Inspection(
        name=data.name or "",
        batches=batches,
        fields={path: _describe_field([batch[path] for batch in leaves]) for path in leaves[0]},
        rows=[[_describe_row(data, batch, texts, row) for row in range(num_rows(batch))] for batch in leaves],
        weights={path: float(np.mean([batch[path] != 0 for batch in leaves])) for path in _weight_fields(leaves[0])},
        padding_share=_padding_share(leaves, texts),
        lengths=_count_lengths(leaves, texts),
        segments_per_row=float(np.mean(np.concatenate(counts))) if counts else None,
        first_batch_seconds=first_batch_seconds,
        rows_per_second=rows_per_second,
        tokens_per_second=rows_per_second * sum(leaves[0][text][0].size for text in texts) if texts else None,
        warnings=_find_warnings(leaves, texts, getattr(data, "vocab_size", None) if vocab_size is None else vocab_size),
    )


def count_shared_rows(makers: Sequence[Callable[[], BaseInput]], num_batches: int) -> int:
    """The number of rows that more than one host reads in its first batches: 0 if the data is sharded correctly.

    Args:
      makers: A function for each host that builds its input; called sequentially, with one input in memory at a time.
      num_batches: Number of batches of each host.
    """
    hosts: dict[str, set[int]] = collections.defaultdict(set)
    for host, make_input in enumerate(makers):
        for batch in _take(make_input(), num_batches):
            leaves = dict(batch.flatten_items())
            for row in range(num_rows(batch)):
                if _has_weight(leaves, row):
                    hosts[_digest(leaves, row)].add(host)
    return sum(len(seen) > 1 for seen in hosts.values())


def _take(data: BaseInput, count: int) -> list[NestedMap]:
    return list(itertools.islice(data.remaining_batches(), count))


def _companion(field: str, name: str) -> str:
    """The path of another field that belongs to a text field: `src.weights` for `src.ids`."""
    return field.removesuffix("ids") + name


def _text_fields(leaves: Leaves) -> list[str]:
    paths = [path for path, array in leaves.items() if array.ndim >= 2 and array.dtype.kind in "iu"]
    with_segments = {path for path in paths if path.endswith("_ids") and _companion(path, "segment_ids") in leaves}
    return [path for path in paths if path.rpartition(".")[2] == "ids" or path in with_segments]


def _weight_fields(leaves: Leaves) -> list[str]:
    return [path for path in leaves if path.rpartition(".")[2] in ("weights", _ROW_WEIGHTS)]


def _has_weight(leaves: Leaves, row: int | slice) -> bool:
    if _ROW_WEIGHTS in leaves and not leaves[_ROW_WEIGHTS][row].any():
        return False
    weights = [path for path in _weight_fields(leaves) if path != _ROW_WEIGHTS]
    return not weights or any(leaves[path][row].any() for path in weights)


def _describe_field(arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    is_number = arrays[0].dtype.kind in "biuf" and all(array.size for array in arrays)
    return {
        "shape": list(arrays[0].shape),
        "dtype": str(arrays[0].dtype),
        "min": min(array.min().item() for array in arrays) if is_number else None,
        "max": max(array.max().item() for array in arrays) if is_number else None,
    }


def _padding_share(batches: Sequence[Leaves], texts: Sequence[str]) -> float | None:
    masks = [_is_padding(leaves, text) for leaves in batches for text in texts]
    if not texts:
        masks = [leaves[path] == 0 for leaves in batches for path in _weight_fields(leaves)]
    padding = [mask.ravel() for mask in masks if mask is not None]
    return float(np.mean(np.concatenate(padding))) if padding else None


def _is_padding(leaves: Leaves, text: str) -> np.ndarray | None:
    for name, value in (("segment_ids", 0), ("paddings", 1), ("weights", 0)):
        if _companion(text, name) in leaves:
            return leaves[_companion(text, name)] == value
    return None


def _count_lengths(batches: Sequence[Leaves], texts: Sequence[str]) -> list[dict[str, int]]:
    lengths = []
    for leaves, text in itertools.product(batches, texts):
        padding = _is_padding(leaves, text)
        tokens = np.ones_like(leaves[text]) if padding is None else 1 - padding
        segment_ids = leaves.get(_companion(text, "segment_ids"), tokens).astype(int)
        lengths += [np.bincount(row)[1:] for row in segment_ids.reshape(-1, segment_ids.shape[-1])]
    found = np.concatenate([*lengths, np.zeros(0, int)])
    width = 1 + (int(found.max(initial=1)) - 1) // _LENGTH_BINS
    counts = np.bincount((found[found > 0] - 1) // width).tolist()
    return [{"first": n * width + 1, "last": (n + 1) * width, "segments": count} for n, count in enumerate(counts)]


def _describe_row(data: BaseInput, leaves: Leaves, texts: Sequence[str], row: int) -> dict[str, list[str]]:
    if texts:
        return {text: _decode_segments(data, leaves, text, row) for text in texts}
    return {path: [str(array[row])] for path, array in leaves.items() if array.ndim == 1 and array.dtype.kind in "iu"}


def _decode_segments(data: BaseInput, leaves: Leaves, field: str, row: int) -> list[str]:
    """The decoded text of a row, split at changes of `segment_ids`, with special tokens by name."""
    ids = leaves[field][row]
    segment_ids = leaves.get(_companion(field, "segment_ids"), np.zeros_like(leaves[field]))[row]
    if _has_loss_mask(leaves, field):
        labels, weights = (leaves[_companion(field, name)][row] for name in ("labels", "weights"))
        cuts = np.flatnonzero(np.diff(segment_ids)) + 1
        split = [np.split(array, cuts) for array in (ids, labels, weights, segment_ids)]
        return [_decode_with_loss_mask(data, field, *part) for part in zip(*split, strict=True)]
    starts = np.flatnonzero(np.diff(segment_ids, prepend=-1))
    split = zip(np.split(ids.ravel(), starts[1:]), segment_ids.ravel()[starts], strict=True)
    return [_decode(data, part, field, is_document=segment > 0) for part, segment in split]


def _has_loss_mask(leaves: Leaves, field: str) -> bool:
    """Whether some tokens that are not padding have weight 0."""
    names = ("segment_ids", "labels", "weights")
    segment_ids, labels, weights = (leaves.get(_companion(field, name)) for name in names)
    if segment_ids is None or labels is None or weights is None or weights.ndim != 2:
        return False
    return bool(((weights == 0) & (segment_ids > 0)).any())


def _decode_with_loss_mask(
    data: BaseInput, field: str, ids: np.ndarray, labels: np.ndarray, weights: np.ndarray, segment_ids: np.ndarray
) -> str:
    """The decoded text of a segment and its last label, with ⟦ ⟧ around the tokens with loss."""
    if segment_ids[0] == 0:
        return _decode(data, ids, field)
    tokens, has_loss = np.append(ids, labels[-1]), np.append(False, weights != 0)
    cuts = np.flatnonzero(np.diff(has_loss)) + 1
    texts = [_decode(data, part, field, is_document=True) for part in np.split(tokens, cuts)]
    return "".join(f"⟦{text}⟧" if loss else text for text, loss in zip(texts, has_loss[[0, *cuts]], strict=True))


def _decode(data: BaseInput, ids: np.ndarray, field: str, is_document: bool = False) -> str:
    special = data.special_tokens(field)
    if is_document:  # its tokens are not padding; without a pad token, rows are padded with the id of a character
        special = {token: name for token, name in special.items() if name != "<pad>"}
    parts = []
    for name, group in itertools.groupby(ids.tolist(), key=special.get):
        run = list(group)
        if name is None:
            parts += data.ids_to_strings(np.array([run]), [len(run)], field)
        else:
            parts.append(name if len(run) == 1 else f"{name}×{len(run)}")
    return "".join(parts)


def _measure_rows_per_second(data: BaseInput) -> float:
    began, rows, seconds = time.perf_counter(), 0, 0.0
    data.reset()
    for batch in data.remaining_batches():
        rows += num_rows(batch)
        if (seconds := time.perf_counter() - began) > _RATE_SECONDS:
            break
    return rows / seconds


def _find_warnings(batches: Sequence[Leaves], texts: Sequence[str], vocab_size: int | None) -> list[str]:
    warnings = []
    all_rows = slice(None)
    digests = collections.Counter(_digest(batch, all_rows) for batch in batches if _has_weight(batch, all_rows))
    if repeated := sum(digests.values()) - len(digests):
        warnings.append(f"{repeated} of {len(batches)} batches repeat another one.")
    if empty := len(batches) - sum(digests.values()):
        warnings.append(f"In {empty} of {len(batches)} batches all weights are zero.")
    fields = [field for text in texts for field in (text, _companion(text, "labels"))]
    ids = [batch[field] for batch in batches for field in fields if field in batch]
    largest = max((int(array.max()) for array in ids), default=0)
    smallest = min((int(array.min()) for array in ids), default=0)
    if vocab_size is not None and largest >= vocab_size:
        warnings.append(f"Ids go up to {largest}, but the model's vocab_size is {vocab_size}.")
    if smallest < 0:
        warnings.append(f"There are negative ids, down to {smallest}.")
    return warnings


def _digest(leaves: Leaves, row: int | slice) -> str:
    """A hash of the rows' content: the text fields, or else all fields with more than one number per row."""
    content = _text_fields(leaves) or [path for path, array in leaves.items() if array.ndim > 1] or list(leaves)
    return digest(leaves[path][row] for path in content)
