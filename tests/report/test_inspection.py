from __future__ import annotations

import functools

import numpy as np
import pytest

from paxcli.errors import DataError
from paxcli.inputs.multi_input import MultiInput
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.inputs.text import TextInput
from paxcli.report.inspection import count_shared_rows, inspect_batches

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}


def synthetic(**fields) -> SyntheticInput:
    return SyntheticInput(**{"batch_size": 2, "seq_len": 64, "vocab_size": 99, "is_training": True, **fields})


def test_shows_segments_and_special_tokens(tmp_path):
    for name, text in {"a": "ab", "b": "cdefg"}.items():
        (tmp_path / name).write_text(text)
    data = TextInput(files=[f"{tmp_path}/*"], batch_size=1, seq_len=6, **EPOCH)
    found = inspect_batches(data, 5)
    assert found.rows == [[{"ids": ["<bos>ab", "<bos>cd"]}], [{"ids": ["efg", "<pad>×3"]}]]
    assert found.fields["ids"] == {"shape": [1, 6], "dtype": "int32", "min": 0, "max": 3 + ord("g")}
    assert found.padding_share == pytest.approx(3 / 12)
    assert found.segments_per_row == pytest.approx(1.5)
    assert [(one["first"], one["last"], one["segments"]) for one in found.lengths] == [(1, 1, 0), (2, 2, 0), (3, 3, 3)]
    assert found.rows_per_second > 0
    assert not found.warnings


def test_special_tokens_are_those_of_the_input_that_a_field_is_from(tmp_path):
    (tmp_path / "a").write_text("abc")
    text = TextInput(files=[f"{tmp_path}/a"], batch_size=1, seq_len=6)
    found = inspect_batches(MultiInput(inputs={"text": text, "walk": synthetic(batch_size=1)}, is_training=True), 1)
    row = found.rows[0][0]
    assert row["text.ids"] == ["<bos>abc", "<pad>×2"] and "<" not in row["walk.ids"][0]


def test_lengths_are_those_of_the_documents(tmp_path):
    lengths = [2, 5, 16, 17, 40, 40, 63]
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text("a" * (length - 1))  # and one token before each
    data = TextInput(files=[f"{tmp_path}/*"], batch_size=2, seq_len=200, **EPOCH)
    found = inspect_batches(data, 1).lengths
    counts, edges = np.histogram(lengths, bins=[1 + 8 * number for number in range(9)])
    assert [one["segments"] for one in found] == counts.tolist()
    assert [one["first"] for one in found] == edges[:-1].tolist()
    assert [one["last"] + 1 for one in found] == edges[1:].tolist()


class TestWarnings:
    def check(self, data, message: str) -> None:
        assert any(message in warning for warning in inspect_batches(data, 3).warnings)

    def test_ids_past_the_vocabulary(self):
        class Shifted(SyntheticInput):
            def get_next(self):
                batch = super().get_next()
                batch.ids = batch.ids + 99
                return batch

        self.check(Shifted(batch_size=2, seq_len=8, vocab_size=99), "vocab_size is 99")

    def test_the_same_batch_twice(self):
        self.check(synthetic(num_examples=2), "2 of 3 batches repeat")

    def test_nothing_to_learn_from(self):
        class Weightless(SyntheticInput):
            def get_next(self):
                batch = super().get_next()
                batch.weights = np.zeros_like(batch.weights)
                return batch

        self.check(Weightless(batch_size=2, seq_len=8, vocab_size=99), "all weights are zero")


def test_rows_shared_by_hosts_are_counted():
    apart = [functools.partial(synthetic, num_infeed_hosts=4, infeed_host_index=host) for host in range(4)]
    assert count_shared_rows(apart, 3) == 0
    assert count_shared_rows([synthetic] * 4, 3) == 6


def test_no_batch_is_an_error():
    data = synthetic(num_examples=2, is_training=False, **EPOCH)
    data.get_next()
    with pytest.raises(DataError, match="has no batch"):
        inspect_batches(data, 1)
