"""Documents end to end, cut into rows of one length, with the arrays that keep them apart."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable
from typing import Self

import numpy as np

from paxcli.inputs.nested_map import NestedMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """All tokens of all documents as rows [R, T]; row r holds tokens r * T and up, and nothing is dropped.

    Args:
      tokens: The tokens and the padding of the last row, and one more [R * T + 1].
      starts: Where each document starts, and where the last one ends [num_documents + 1].
      seq_len: T.
      pad_id: What stands where there is no token.
      eos_id: The label of each document's last token.
    """

    tokens: np.ndarray
    starts: np.ndarray
    seq_len: int
    pad_id: int
    eos_id: int

    @classmethod
    def pack(cls, documents: Iterable[np.ndarray], *, seq_len: int, pad_id: int, eos_id: int) -> Self:
        """Packs documents, each an array of ids [length]; empty ones hold nothing."""
        kept = [document for document in documents if len(document)]
        starts = np.cumsum([0, *map(len, kept)], dtype=np.int64)
        padding = -starts[-1] % seq_len + 1
        dtype = kept[0].dtype if kept else np.int32
        tokens = np.concatenate([*kept, np.full(padding, pad_id, dtype)])
        return cls(tokens=tokens, starts=starts, seq_len=seq_len, pad_id=pad_id, eos_id=eos_id)

    @property
    def num_rows(self) -> int:
        """R."""
        return (len(self.tokens) - 1) // self.seq_len

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of all rows."""
        return zlib.crc32(self.starts.data, zlib.crc32(self.tokens.data, self.seq_len))

    def rows(self, numbers: np.ndarray) -> NestedMap:
        """The language-model batch of these rows, every field [B, T]; -1 is a row of padding."""
        numbers = np.asarray(numbers)
        first = numbers * self.seq_len
        column = np.arange(self.seq_len, dtype=np.int32)
        num_tokens = np.where(numbers >= 0, self.starts[-1] - first, 0)
        is_token = column < num_tokens[:, None]
        starts = self._document_starts(first)
        inner = starts[:, :-1]
        segment_ids = np.cumsum(inner, axis=1, dtype=np.int32) + np.int32(1)
        segment_pos = column - np.maximum.accumulate(np.where(inner, column, 0), axis=1)
        ids = self.tokens[:-1].reshape(-1, self.seq_len)[numbers].astype(np.int32)
        ids = np.where(is_token, ids, np.int32(self.pad_id))
        following = np.append(ids[:, 1:], self.tokens[first + self.seq_len, None].astype(np.int32), axis=1)
        labels = np.where(starts[:, 1:], np.int32(self.eos_id), following)
        return NestedMap(
            ids=ids,
            labels=np.where(is_token, labels, np.int32(self.pad_id)),
            weights=is_token.astype(np.float32),
            segment_ids=np.where(is_token, segment_ids, 0),
            segment_pos=np.where(is_token, segment_pos, 0),
        )

    def _document_starts(self, first: np.ndarray) -> np.ndarray:
        """Whether a document starts at each column but the first, and just after the row [B, T + 1]."""
        low = np.searchsorted(self.starts, first, side="right")
        high = np.searchsorted(self.starts, first + self.seq_len, side="right")
        count = high - low
        row = np.repeat(np.arange(len(first)), count)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        is_start = np.zeros((len(first), self.seq_len + 1), bool)
        is_start[row, self.starts[low[row] + nth] - first[row]] = True
        return is_start
