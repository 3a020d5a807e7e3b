from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paxcli.inputs.packing import PackedTokens

PAD, EOS = 0, 1


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
    packed = PackedTokens.pack(
        [np.array(document, np.uint16) for document in documents], seq_len=seq_len, pad_id=PAD, eos_id=EOS
    )
    expected = pack_slowly(documents, seq_len)
    assert packed.num_rows == len(expected)
    if expected:
        batch = packed.rows(np.arange(packed.num_rows)[::-1])
        for row, numbers in enumerate(reversed(expected)):
            assert {name: array[row].tolist() for name, array in batch.items()} == numbers


def test_minus_one_is_a_row_of_padding():
    packed = PackedTokens.pack([np.array([5, 6, 7, 8, 9])], seq_len=2, pad_id=PAD, eos_id=EOS)
    batch = packed.rows(np.array([-1, 2, -1]))
    assert batch.ids.tolist() == [[0, 0], [9, 0], [0, 0]]
    assert batch.labels.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert batch.weights.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert not batch.segment_ids[[0, 2]].any()


def test_checksum_tells_packings_apart():
    def checksum(documents, seq_len=4):
        arrays = [np.array(document, np.uint16) for document in documents]
        return PackedTokens.pack(arrays, seq_len=seq_len, pad_id=PAD, eos_id=EOS).checksum

    base = checksum([[5, 6], [7]])
    assert base == checksum([[5, 6], [7]])
    assert len({base, checksum([[5, 6], [8]]), checksum([[5], [6, 7]]), checksum([[5, 6], [7]], seq_len=3)}) == 4
