"""Documents in rows of one length, end to end or each where it fits, with the arrays that keep them apart."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from paxcli.nested_map import NestedMap

CONCAT, FIRST_FIT, ONE_PER_ROW = PACKINGS = ("concat", "first_fit", "one_per_row")
_OPEN_ROWS = 64
_CHUNK = 2**24


class _Pieces(NamedTuple):
    """Parts of documents that rows of a batch are made of, in order: row of the batch, first token, length [K]."""

    row: np.ndarray
    begin: np.ndarray
    length: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """The tokens of documents as rows [R, T]. The last token of a document is only a label, of the one before it.

    With `concat`, documents stand end to end and are cut every T tokens. With `first_fit`, a document stands in the
    first of the 64 latest open rows with room for it, and only one of more than T tokens is cut. With `one_per_row`,
    each row holds one document, or a part of one of more than T tokens. Nothing is dropped.

    Args:
      tokens: The tokens of all documents end to end, in memory or memory-mapped [N].
      starts: How many tokens with a label stand before each document, and in all [num_documents + 1].
      seq_len: T.
      pad_id: What stands where there is no token.
      packing: `concat`, `first_fit` or `one_per_row`.
      begins: Where in `tokens` each document begins; None: where the one before it ends [num_documents].
      loss_weights: Loss weight of each token as a label [N]; None: 1.
    """

    tokens: np.ndarray
    starts: np.ndarray
    seq_len: int
    pad_id: int
    packing: str = CONCAT
    begins: np.ndarray | None = None
    loss_weights: np.ndarray | None = None

    @classmethod
    def pack(cls, documents: Iterable[np.ndarray], *, seq_len: int, pad_id: int, eos_id: int) -> Self:
        """Packs documents, each an array of ids [length], end to end; the last token of each has the label `eos_id`."""
        kept = [np.append(document, np.array(eos_id, document.dtype)) for document in documents if len(document)]
        starts = np.cumsum([0, *(len(document) - 1 for document in kept)], dtype=np.int64)
        tokens = np.concatenate(kept) if kept else np.zeros(0, np.int32)
        return cls(tokens=tokens, starts=starts, seq_len=seq_len, pad_id=pad_id)

    def without_longer(self, limit: int) -> Self:
        """The same without the documents of more than `limit` tokens."""
        lengths = np.diff(self.starts)
        kept = np.flatnonzero(lengths <= limit)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept], dtype=np.int64)])
        return dataclasses.replace(self, starts=starts, begins=self._begin_of(kept))

    @property
    def num_documents(self) -> int:
        """Documents that hold a token."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens with a label."""
        return int(self.starts[-1])

    @property
    def num_rows(self) -> int:
        """R."""
        if self.packing == CONCAT:
            return -(-self.num_tokens // self.seq_len)
        return len(self._pieces_by_row[0]) - 1

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of all rows."""
        total = self.seq_len
        lasts = self._begin_of(np.arange(self.num_documents)) + np.diff(self.starts)
        for first in range(0, len(self.tokens), _CHUNK):
            chunk = np.asarray(self.tokens[first : first + _CHUNK])
            inside = lasts[np.searchsorted(lasts, first) : np.searchsorted(lasts, first + len(chunk))]
            total = zlib.crc32(np.delete(chunk, inside - first).data, total)
        padding = -self.num_tokens % self.seq_len + 1
        total = zlib.crc32(np.full(padding, self.pad_id, self.tokens.dtype).data, total)
        total = zlib.crc32(np.ascontiguousarray(self.starts).data, total)
        if self.loss_weights is not None:
            total = zlib.crc32(np.ascontiguousarray(self.loss_weights).data, total)
        return total if self.packing == CONCAT else zlib.crc32(self.packing.encode(), total)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        """The language-model batch of these rows, every field [B, T]; -1 is a row of padding."""
        numbers = np.asarray(numbers)
        batch, seq_len = len(numbers), self.seq_len
        pieces = self._pieces_concat(numbers) if self.packing == CONCAT else self._pieces_of_rows(numbers)
        # Behind the pieces of each row comes one of padding.
        count = np.bincount(pieces.row, minlength=batch)
        last = np.cumsum(count) + np.arange(batch)
        mine = np.arange(len(pieces.row)) + pieces.row
        begin, length, segment = (np.zeros(len(mine) + batch, dtype) for dtype in (np.int64, np.int64, np.int32))
        begin[mine], length[mine] = pieces.begin, pieces.length
        length[last] = seq_len - np.bincount(pieces.row, pieces.length, minlength=batch).astype(np.int64)
        segment[mine] = mine - np.repeat(last - count, count) + 1
        segment_ids = np.repeat(segment, length)
        first = (np.cumsum(length) - length).astype(np.int32)
        segment_pos = np.arange(batch * seq_len, dtype=np.int32) - np.repeat(first, length)
        is_token = segment_ids > 0
        segment_pos *= is_token
        index = np.repeat(begin, length) + segment_pos
        ids = self.tokens[index].astype(np.int32)
        index += is_token
        labels = self.tokens[index].astype(np.int32)
        weights = is_token.astype(np.float32)
        if self.loss_weights is not None:
            weights *= self.loss_weights[index]
        if not is_token.all():
            ids, labels = (np.where(is_token, values, np.int32(self.pad_id)) for values in (ids, labels))
        fields = {
            "ids": ids,
            "labels": labels,
            "weights": weights,
            "segment_ids": segment_ids,
            "segment_pos": segment_pos,
        }
        return NestedMap({name: values.reshape(batch, seq_len) for name, values in fields.items()})

    def _begin_of(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in `tokens`: each one before added a token that is only a label."""
        return self.starts[documents] + documents if self.begins is None else self.begins[documents]

    def _pieces_concat(self, numbers: np.ndarray) -> _Pieces:
        first = numbers * self.seq_len
        end = np.minimum(first + self.seq_len, self.num_tokens)
        low = np.searchsorted(self.starts, first, side="right") - 1
        high = np.searchsorted(self.starts, end)
        row, nth = _repeated(np.where(numbers >= 0, high - low, 0))
        document = low[row] + nth
        begin = np.maximum(self.starts[document], first[row])
        length = np.minimum(self.starts[document + 1], end[row]) - begin
        begin += self._begin_of(document) - self.starts[document]
        held = length > 0
        return _Pieces(row[held], begin[held], length[held])

    def _pieces_of_rows(self, numbers: np.ndarray) -> _Pieces:
        rows, begins, lengths = self._pieces_by_row
        row, nth = _repeated(np.where(numbers >= 0, rows[numbers + 1] - rows[numbers], 0))
        piece = rows[numbers][row] + nth
        return _Pieces(row, begins[piece], lengths[piece])

    @functools.cached_property
    def _pieces_by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the pieces of each row start [R + 1]; where each piece begins in `tokens`, and its length [K]."""
        document, nth = _repeated(-(-np.diff(self.starts) // self.seq_len))
        begins = self._begin_of(document) + nth * self.seq_len
        lengths = np.minimum(self.starts[document + 1] - self.starts[document] - nth * self.seq_len, self.seq_len)
        rows = first_fit(lengths, self.seq_len) if self.packing == FIRST_FIT else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows), dtype=np.int64)])
        return first, begins[order], lengths[order].astype(np.int32)


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row for each piece of these lengths [K]: the first with room among the 64 that were opened last."""
    rows, open_rows, free = np.empty(len(lengths), np.int64), [], []
    num_rows = 0
    for number, length in enumerate(lengths.tolist()):
        slot = next((slot for slot, left in enumerate(free) if length <= left), len(free))
        if slot == len(free):
            open_rows.append(num_rows)
            free.append(room)
            num_rows += 1
        rows[number] = open_rows[slot]
        free[slot] -= length
        if free[slot] == 0:
            del free[slot], open_rows[slot]
        elif len(free) > _OPEN_ROWS:
            del free[0], open_rows[0]
    return rows


def _repeated(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [N]: each number n, counts[n] times; and which time it is [sum of counts]."""
    number = np.repeat(np.arange(len(counts)), counts)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
