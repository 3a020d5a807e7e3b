from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paxcli.inputs.packing import PACKINGS, PackedTokens, first_fit

PAD, EOS = 0, 1


def pack(documents: Iterable[np.ndarray], seq_len: int) -> PackedTokens:
    """The documents, arrays of ids [length], each followed by its end token."""
    kept = [np.append(document, np.array(EOS, document.dtype)) for document in documents if len(document)]
    starts = np.cumsum([0, *(len(document) - 1 for document in kept)], dtype=np.int64)
    tokens = np.concatenate(kept) if kept else np.zeros(0, np.int32)
    return PackedTokens(tokens=tokens, starts=starts, seq_len=seq_len, pad_id=PAD)


def pack_slowly(documents: list[list[int]], seq_len: int) -> list[dict[str, list]]:
    """The same rows, a token at a time."""
    pairs = [
        (token, document[i + 1] if i + 1 < len(document) else EOS, number)
        for number, document in enumerate(documents)
        for i, token in enumerate(document)
    ]
    rows = []
    for first in range(0, len(pairs), seq_len):
        row = {"ids": [], "labels": [], "weights": [], "segment_ids": [], "segment_pos": []}
        previous, segment, position = None, 0, 0
        for token, label, number in pairs[first : first + seq_len]:
            if number != previous:
                previous, segment, position = number, segment + 1, 0
            for name, value in zip(row, (token, label, 1.0, segment, position), strict=True):
                row[name].append(value)
            position += 1
        missing = seq_len - len(row["ids"])
        rows.append({name: values + [PAD] * missing for name, values in row.items()})
    return rows


documents = st.lists(st.lists(st.integers(2, 300), max_size=12), max_size=12)


@given(documents, st.integers(1, 10))
def test_agrees_with_packing_a_token_at_a_time(documents, seq_len):
    packed = pack([np.array(document, np.uint16) for document in documents], seq_len=seq_len)
    expected = pack_slowly(documents, seq_len)
    assert packed.num_rows == len(expected)
    if expected:
        batch = packed.rows(np.arange(packed.num_rows)[::-1])
        for row, numbers in enumerate(reversed(expected)):
            assert {name: array[row].tolist() for name, array in batch.items()} == numbers


def test_minus_one_is_a_row_of_padding():
    packed = pack([np.array([5, 6, 7, 8, 9])], seq_len=2)
    batch = packed.rows(np.array([-1, 2, -1]))
    assert batch.ids.tolist() == [[0, 0], [9, 0], [0, 0]]
    assert batch.labels.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert batch.weights.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert not batch.segment_ids[[0, 2]].any()


def test_checksums_of_packings_differ():
    def checksum(documents, seq_len=4):
        arrays = [np.array(document, np.uint16) for document in documents]
        return pack(arrays, seq_len=seq_len).checksum

    base = checksum([[5, 6], [7]])
    assert base == checksum([[5, 6], [7]])
    assert len({base, checksum([[5, 6], [8]]), checksum([[5], [6, 7]]), checksum([[5, 6], [7]], seq_len=3)}) == 4


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 12))
def test_first_fit_keeps_every_token_and_splits_only_long_documents(lengths, seq_len):
    documents = [np.arange(length) + 1000 * (1 + number) for number, length in enumerate(lengths)]
    concat = pack(documents, seq_len=seq_len)
    packed = dataclasses.replace(concat, packing="first_fit")
    segments = []
    if packed.num_rows:
        batch = packed.rows(np.arange(packed.num_rows))
        for row in range(packed.num_rows):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                mine = batch.segment_ids[row] == segment
                assert batch.segment_pos[row, mine].tolist() == list(range(mine.sum()))
                segments.append((batch.ids[row, mine].tolist(), batch.labels[row, mine].tolist()))
    expected = [
        (document[at : at + seq_len].tolist(), [*document[1:], EOS][at : at + seq_len])
        for document in documents
        for at in range(0, len(document), seq_len)
    ]
    assert sorted(segments) == sorted(expected)
    assert packed.num_rows == 0 or packed.checksum != concat.checksum


def test_first_fit_uses_the_first_row_with_space():
    assert first_fit(np.array([5, 7, 4, 3, 1, 10, 1]), 10).tolist() == [0, 1, 0, 1, 0, 2, 3]


def test_one_per_row_gives_each_document_rows_of_its_own():
    documents = [np.array(ids) for ids in ([5, 6], [7, 8, 9, 10, 11], [12])]
    packed = pack(documents, seq_len=3)
    batch = dataclasses.replace(packed, packing="one_per_row").rows(np.arange(4))
    assert batch.ids.tolist() == [[5, 6, 0], [7, 8, 9], [10, 11, 0], [12, 0, 0]]
    assert batch.labels.tolist() == [[6, 1, 0], [8, 9, 10], [11, 1, 0], [1, 0, 0]]
    assert (batch.segment_ids == (batch.ids > 0)).all()


@given(documents.filter(any), st.integers(1, 10), st.sampled_from(PACKINGS))
def test_loss_weights_are_those_of_the_labels(documents, seq_len, packing):
    packed = pack([np.array(ids, np.int64) for ids in documents], seq_len=seq_len)
    weighted = dataclasses.replace(packed, packing=packing, loss_weights=packed.tokens % 3)
    batch = weighted.rows(np.arange(weighted.num_rows))
    assert (batch.weights == np.where(batch.segment_ids > 0, batch.labels % 3, 0)).all()
    assert batch.weights.dtype == np.float32
    assert weighted.checksum != dataclasses.replace(packed, packing=packing).checksum
