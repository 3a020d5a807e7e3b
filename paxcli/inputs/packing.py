"""Packs documents into rows of fixed length, with segment ids, positions and loss weights."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import NamedTuple, Self

import numpy as np

from paxcli.nested_map import NestedMap

CONCAT, FIRST_FIT, ONE_PER_ROW = PACKINGS = ("concat", "first_fit", "one_per_row")
_OPEN_ROWS = 64
_CHUNK = 2**24


class _Pieces(NamedTuple):
    """Pieces of documents in the rows of a batch, in order: row in the batch, index of the first token, length [K]."""

    row: np.ndarray
    begin: np.ndarray
    length: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Documents packed into rows [R, T]. The last token of a document is only a label, never an input.

    `concat` concatenates documents and splits them every T tokens. `first_fit` places a document in the first of the 64
    latest open rows that has space for it, and splits only documents of more than T tokens. `one_per_row` starts a row
    for each document, and splits those of more than T tokens over several rows. No token is dropped.

    Args:
      tokens: The concatenated tokens of all documents, in memory or memory-mapped [N].
      starts: Number of tokens with a label before each document, and in total [num_documents + 1].
      seq_len: T.
      pad_id: Id of padding positions.
      packing: `concat`, `first_fit` or `one_per_row`.
      begins: Index in `tokens` of each document's first token [num_documents]. None: documents are contiguous.
      loss_weights: Loss weight of each token as a label [N]. None: 1.
    """

    tokens: np.ndarray
    starts: np.ndarray
    seq_len: int
    pad_id: int
    packing: str = CONCAT
    begins: np.ndarray | None = None
    loss_weights: np.ndarray | None = None

    def drop_longer(self, limit: int) -> Self:
        """A copy without the documents of more than `limit` tokens."""
        lengths = np.diff(self.starts)
        kept = np.flatnonzero(lengths <= limit)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept], dtype=np.int64)])
        return dataclasses.replace(self, starts=starts, begins=self._first_tokens(kept))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a label."""
        return int(self.starts[-1])

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return -(-self.num_tokens // self.seq_len) if self.packing == CONCAT else len(self._pieces_by_row[0]) - 1

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of all rows."""
        total = self.seq_len
        lasts = self._first_tokens(np.arange(self.num_documents)) + np.diff(self.starts)
        for first in range(0, len(self.tokens), _CHUNK):
            chunk = np.asarray(self.tokens[first : first + _CHUNK])
            inside = lasts[np.searchsorted(lasts, first) : np.searchsorted(lasts, first + len(chunk))]
            total = zlib.crc32(np.delete(chunk, inside - first).data, total)
        padding = -self.num_tokens % self.seq_len + 1
        # Texts end with the same token, conversations and what is left of truncated ones do not.
        ends = None if self.loss_weights is None else self.tokens[lasts]
        for part in (np.full(padding, self.pad_id, self.tokens.dtype), self.starts, self.loss_weights, ends):
            if part is not None:
                total = zlib.crc32(np.ascontiguousarray(part).data, total)
        return total if self.packing == CONCAT else zlib.crc32(self.packing.encode(), total)

    def rows(self, numbers: np.ndarray) -> NestedMap:
        """A language-model batch of these rows, every field [B, T]; -1 is a row of padding."""
        batch, seq_len = len(numbers), self.seq_len
        row, begin, length = self._pieces_concat(numbers) if self.packing == CONCAT else self._pieces_of_rows(numbers)
        _, nth = _enumerate_counts(np.bincount(row, minlength=batch))
        segment = nth + 1
        missing = seq_len - np.bincount(row, length, minlength=batch).astype(np.int64)
        if has_padding := missing.any():  # it is segment 0, at the end of each row
            ends = np.searchsorted(row, np.arange(batch), side="right")
            begin, segment = np.insert(begin, ends, 0), np.insert(segment, ends, 0)
            length = np.insert(length, ends, missing)
        first = np.cumsum(length) - length
        position = np.arange(batch * seq_len, dtype=np.int32)
        segment_ids = np.repeat(segment.astype(np.int32), length)
        segment_pos = position - np.repeat(first.astype(np.int32), length)
        index = position + np.repeat(begin - first, length)
        ids = self.tokens.take(index, mode="clip").astype(np.int32)
        # Labels are the next ids, but for the last token of a piece.
        labels = np.append(ids[1:], ids[:1])
        is_piece = segment > 0
        labels[(first + length - 1)[is_piece]] = self.tokens[(begin + length)[is_piece]]
        weights = (segment_ids > 0).astype(np.float32)
        if self.loss_weights is not None:
            weights *= self.loss_weights.take(index + 1, mode="clip")
        if has_padding:
            is_padding = segment_ids == 0
            ids[is_padding] = labels[is_padding] = self.pad_id
            segment_pos[is_padding] = 0
        rows = NestedMap(ids=ids, labels=labels, weights=weights, segment_ids=segment_ids, segment_pos=segment_pos)
        return NestedMap({name: values.reshape(batch, seq_len) for name, values in rows.items()})

    def _first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """The index in `tokens` of each document's first token: each earlier document has one token without a label."""
        return self.starts[documents] + documents if self.begins is None else self.begins[documents]

    def _pieces_concat(self, numbers: np.ndarray) -> _Pieces:
        first = numbers * self.seq_len
        end = np.minimum(first + self.seq_len, self.num_tokens)
        low = np.searchsorted(self.starts, first, side="right") - 1
        row, nth = _enumerate_counts(np.where(numbers >= 0, np.searchsorted(self.starts, end) - low, 0))
        document = low[row] + nth
        begin = np.maximum(self.starts[document], first[row])
        length = np.minimum(self.starts[document + 1], end[row]) - begin
        begin += self._first_tokens(document) - self.starts[document]
        nonempty = length > 0
        return _Pieces(row[nonempty], begin[nonempty], length[nonempty])

    def _pieces_of_rows(self, numbers: np.ndarray) -> _Pieces:
        rows, begins, lengths = self._pieces_by_row
        row, nth = _enumerate_counts(np.where(numbers >= 0, rows[numbers + 1] - rows[numbers], 0))
        piece = rows[numbers][row] + nth
        return _Pieces(row, begins[piece], lengths[piece])

    @functools.cached_property
    def _pieces_by_row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first piece of each row [R + 1]; the first token of each piece, and its length [K]."""
        document, nth = _enumerate_counts(-(-np.diff(self.starts) // self.seq_len))
        begins = self._first_tokens(document) + nth * self.seq_len
        lengths = np.minimum(self.starts[document + 1] - self.starts[document] - nth * self.seq_len, self.seq_len)
        rows = first_fit(lengths, self.seq_len) if self.packing == FIRST_FIT else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows), dtype=np.int64)])
        return first, begins[order], lengths[order].astype(np.int32)


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each piece, given its length [K]: the first one with enough space among the 64 opened last."""
    rows, num_rows = np.empty(len(lengths), np.int64), 0
    free: dict[int, int] = {}  # space in each open row, the oldest first
    for number, length in enumerate(lengths.tolist()):
        row = next((row for row, left in free.items() if length <= left), num_rows)
        rows[number], num_rows = row, max(num_rows, row + 1)
        free[row] = free.get(row, room) - length
        if free[row] == 0:
            del free[row]
        elif len(free) > _OPEN_ROWS:
            del free[next(iter(free))]
    return rows


def _enumerate_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [N]: each index n, counts[n] times, and its repetition from 0 to counts[n] - 1 [sum of counts]."""
    number = np.repeat(np.arange(len(counts)), counts)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
