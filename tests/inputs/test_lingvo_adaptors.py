"""The adaptors with real Lingvo generators. `make test-lingvo` runs this where Lingvo can be loaded."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.lingvo_adaptors import LingvoEvalAdaptor, LingvoInputAdaptor, LingvoInputAdaptorNewBatchSize
from paxcli.report.inspection import inspect_batches
from tests.inputs.lingvo_marks import MARKS

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}
IN_ORDER = {"cluster_do_eval": True, **EPOCH}

pytestmark = MARKS


@pytest.fixture
def data():
    from tests.inputs import lingvo_data

    return lingvo_data


def take(source, count):
    return [source.get_next() for _ in range(count)]


def nums(batches):
    return [batch.num.tolist() for batch in batches]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class TestAdaptor:
    def test_every_eval_reads_all_data_in_order(self, data, tmp_path):
        source = LingvoInputAdaptor(input=data.numbers(tmp_path, 22, 1, repeat_count=1), **IN_ORDER)
        epoch = list(source.eval_batches())
        expected = [[*range(i, i + 4)] for i in range(0, 20, 4)] + [[20, 21, 20, 20]]
        assert nums(epoch) == expected == nums(source.eval_batches())
        assert epoch[-1].eval_sample_weights.tolist() == epoch[-1].weights.tolist() == [1, 1, 0, 0]
        assert "name" not in epoch[0]  # string fields are removed
        assert source.num_batches is None and take(source, 6) and source.peek() is None

    def test_num_batches_ends_sooner(self, data, tmp_path):
        source = LingvoInputAdaptor(input=data.numbers(tmp_path, 24, 1), num_batches=2, **IN_ORDER)
        assert nums(source.eval_batches()) == nums(source.eval_batches()) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_seed_0_is_the_runs_seed_and_differs_by_host(self, data, tmp_path):
        params = data.numbers(tmp_path)

        def batches(host=0, seed=7):
            return take(
                LingvoInputAdaptor(
                    input=params, is_training=True, num_infeed_hosts=2, infeed_host_index=host, input_random_seed=seed
                ),
                30,
            )

        first = batches()
        assert_same(first, batches())
        assert not {*map(tuple, nums(first))} & {*map(tuple, nums(batches(host=1)))}
        assert nums(first) != nums(batches(seed=8))
        assert {*np.ravel(nums(batches()))} == {*range(120)}
        assert [batches(host)[0].host.tolist() for host in range(2)] == [[0] * 4, [1] * 4]
        assert params.file_random_seed == 0  # The recipe's own params are left alone.

    def test_a_fixed_seed_must_be_allowed_and_differs_by_host(self, data, tmp_path):
        params = data.numbers(tmp_path, file_random_seed=301)
        with pytest.raises(ConfigError, match="file_random_seed=301"):
            LingvoInputAdaptor(input=params, is_training=True).get_next()
        fixed = {"is_training": True, "allow_fixed_file_random_seed": True}
        moved = LingvoInputAdaptor(input=params, num_infeed_hosts=2, infeed_host_index=1, **fixed)
        same = LingvoInputAdaptor(input=params.Copy().Set(file_random_seed=302), **fixed)
        assert nums(take(moved, 3)) == nums(take(same, 3))

    def test_resumes_exactly_and_peeks_without_advancing(self, data, tmp_path):
        def make():
            return LingvoInputAdaptor(input=data.numbers(tmp_path), is_training=True, input_random_seed=3)

        whole = take(make(), 40)
        for done in (0, 1, 17, 35):
            source = make()
            taken = take(source, done)
            assert_same(source.peek(), whole[done])
            state = json.loads(json.dumps(source.get_state()))
            assert_same(taken + take(source, 2), whole[: done + 2])
            again = make()
            again.set_state(state)
            assert_same(take(again, 5), whole[done : done + 5])

    def test_warns_if_it_cannot_resume_exactly(self, data, tmp_path, caplog):
        params = data.numbers(tmp_path, 1200, file_parallelism=6)
        source = LingvoInputAdaptor(input=params, is_training=True)
        take(source, 20)
        state = source.get_state() | {"last": "another"}
        source.set_state(state)
        assert "resumes in a different order" in caplog.text
        with pytest.raises(DataError, match="read by 1 hosts"):
            LingvoInputAdaptor(input=params, is_training=True, num_infeed_hosts=2).set_state(state)

    def test_a_dataset_repeats_in_training_and_ends_in_an_eval(self, data):
        train = LingvoInputAdaptor(input=data.Counted.Params, is_training=True)
        assert [int(batch.data[0]) for batch in take(train, 25)] == [i % 11 for i in range(25)]
        spec, batch = train.element_spec(), train.get_next()
        assert spec.data.dtype == batch.data.dtype == np.int32 and batch.a.b.shape == (1,)
        evaluation = LingvoInputAdaptor(input=data.Counted.Params(), **IN_ORDER)
        for _ in range(2):
            assert [int(batch.a.b[0]) for batch in evaluation.eval_batches()] == [*range(11)]
        rolling = LingvoInputAdaptor(input=data.Counted.Params(), cluster_do_eval=True, eval_loop_num_batches=4)
        runs = [[int(b.data[0]) for b in rolling.eval_batches()] for _ in range(3)]
        assert runs == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0]]

    def test_a_subclass_of_an_adaptor_may_change_batches(self, data):
        class Doubled(LingvoInputAdaptor):
            def get_next(self):
                batch = super().get_next()
                batch.doubled = batch.data * 2
                return batch

        source = Doubled(input=data.Counted.Params(), is_training=True)
        assert source.element_spec().doubled.shape == (1,)
        take(source, 3)
        assert source.peek().doubled == source.get_next().doubled == 6

    def test_a_new_batch_size_splits_packed_batches(self, data, tmp_path):
        params = data.packed_pairs(tmp_path)
        large = LingvoInputAdaptor(input=params, is_training=True)
        small = LingvoInputAdaptorNewBatchSize(input=params, batch_size=2, is_training=True)
        whole, parts = take(large, 2), take(small, 8)
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        assert_same(joined, jax.tree.map(lambda *arrays: np.concatenate(arrays), *whole))
        again = LingvoInputAdaptorNewBatchSize(input=params, batch_size=2, is_training=True)
        again.set_state(small.get_state())
        assert_same(again.peek(), small.get_next())
        assert_same(again.get_next(), jax.tree.map(lambda array: array[:2], large.get_next()))
        with pytest.raises(ConfigError, match="not a multiple of batch_size=3"):
            LingvoInputAdaptorNewBatchSize(input=params, batch_size=3, is_training=True).get_next()

    def test_inspection_shows_packed_segments(self, data, tmp_path):
        source = LingvoInputAdaptor(input=data.packed_pairs(tmp_path), is_training=True)
        found = inspect_batches(source, 1)
        assert found.segments_per_row > 1 and 0 < found.padding_share < 1
        texts = found.rows[0][0]
        assert {"src.ids", "tgt.ids"} <= texts.keys() and " and " in texts["src.ids"][0]
        assert not found.warnings


class TestEvalAdaptor:
    @pytest.mark.parametrize("hosts", [1, 2, 3])
    @pytest.mark.parametrize("order", ["in order", "shuffled"])
    def test_an_epoch_is_sharded_over_hosts(self, data, tmp_path, hosts, order):
        reads = {"cluster_do_eval": True} if order == "in order" else {"num_batches": 101}
        params = data.numbers(tmp_path, 101, 1, batch_size=1, repeat_count=1 if order == "in order" else -1)
        parts = [
            [
                *LingvoEvalAdaptor(
                    input=params, batch_size=8, num_infeed_hosts=hosts, infeed_host_index=host, **reads, **EPOCH
                ).eval_batches()
            ]
            for host in range(hosts)
        ]
        assert {len(part) for part in parts} == {-(-101 // (8 * hosts))}
        whole = jax.tree.map(
            lambda *a: np.concatenate(a), *[batch for step in zip(*parts, strict=True) for batch in step]
        )
        if order == "in order":
            assert whole.num[:101].tolist() == [*range(101)]
        assert sorted(whole.num[whole.eval_sample_weights > 0]) == [*range(101)]
        assert whole.weights.sum() == whole.eval_sample_weights.sum() == 101
        assert {*whole.num[101:]} <= {whole.num[0]}

    def test_peek_reset_and_state(self, data):
        source = LingvoEvalAdaptor(input=data.Counted.Params(), batch_size=3, **IN_ORDER)
        first = source.get_next()
        state = json.loads(json.dumps(source.get_state()))
        second = source.peek()
        assert_same(second, source.get_next())
        source.set_state(state)
        assert_same(second, source.get_next())
        source.reset()
        assert_same(first, source.get_next())


@pytest.mark.parametrize(
    ("cls", "fields", "params", "error", "message"),
    [
        (LingvoInputAdaptor, {"batch_size": 4}, {}, ConfigError, "but the data of LingvoInputAdaptor sets it"),
        (LingvoInputAdaptor, {"num_batches": 0}, {}, ConfigError, "num_batches must be at least 1"),
        (LingvoInputAdaptor, EPOCH, {}, ConfigError, "reset_for_eval=True needs"),
        (LingvoInputAdaptor, {}, {"repeat_count": 1}, ConfigError, "only if it reads in order"),
        (
            LingvoInputAdaptor,
            {**IN_ORDER, "num_infeed_hosts": 2},
            {"repeat_count": 1},
            ConfigError,
            "different lengths",
        ),
        (LingvoInputAdaptor, {}, {"file_pattern": "tfrecord:/nowhere/*"}, DataError, "No file matches /nowhere"),
        (LingvoInputAdaptor, {**IN_ORDER, "reset_for_eval": False}, {}, ConfigError, "nothing restarts"),
        (LingvoInputAdaptorNewBatchSize, {}, {}, ConfigError, "batch_size is None"),
        (LingvoEvalAdaptor, {"batch_size": 4}, {}, ConfigError, "only supports evaluation epochs"),
        (LingvoEvalAdaptor, {"batch_size": 4, **EPOCH}, {}, ConfigError, "reset_for_eval=True needs"),
    ],
)
def test_invalid_settings_are_named(data, tmp_path, cls, fields, params, error, message):
    with pytest.raises(error, match=message):
        cls(input=data.numbers(tmp_path, **params), **fields).check_data()


def test_a_value_that_is_not_a_generator_is_named(data):
    with pytest.raises(ConfigError, match="input is 3"):
        LingvoInputAdaptor(input=3).validate()
    with pytest.raises(ConfigError, match="reset_for_eval=True needs"):
        LingvoEvalAdaptor(input=data.Counted.Params(), batch_size=1, **EPOCH).check_data()
    with pytest.raises(DataError, match="has no batches"):
        LingvoInputAdaptor(
            input=data.Counted.Params().Set(args=data.Counted.Params().args.Set(num=0)), cluster_do_eval=True
        ).get_next()
