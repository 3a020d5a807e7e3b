"""Tests of the `BaseInput` contract, for every input class."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import pkgutil
import random

import jax
import numpy as np
import pytest
from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

import paxcli.inputs
from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.inputs.base_input import BaseInput
from paxcli.inputs.c4 import C4, C4Input
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.lingvo_adaptors import LingvoEvalAdaptor, LingvoInputAdaptor, LingvoInputAdaptorNewBatchSize
from paxcli.inputs.mixture import MixtureInput
from paxcli.inputs.multi_input import MultiInput
from paxcli.inputs.preference import PreferenceInput
from paxcli.inputs.seqio_features import LanguageModelFeatures
from paxcli.inputs.seqio_input import SeqIOInput
from paxcli.inputs.stdlib import StdlibInput
from paxcli.inputs.synthetic import SyntheticImages, SyntheticInput, SyntheticPairs
from paxcli.inputs.text import TextInput
from paxcli.nested_map import NestedMap
from tests.inputs.formats import write_formats
from tests.inputs.seqio_tasks import register, write_c4

GLOBAL_BATCH = 24
EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}
KINDS = {
    SyntheticInput: {"vocab_size": 300, "seq_len": 16, "num_examples": 101},
    SyntheticImages: {"image_size": 4, "num_classes": 10, "num_examples": 101},
    SyntheticPairs: {"vocab_size": 300, "seq_len": 16, "num_examples": 101},
    TextInput: {"seq_len": 16},
    ChatInput: {"seq_len": 256},
    MixtureInput: {"seq_len": 16, "weights": [2, 1]},
    StdlibInput: {"seq_len": 256, "split": "eval"},
    SeqIOInput: {"mixture_name": "pax_toy_lm", "split_name": "train", "seq_len": 18},
    C4Input: {
        "split_name": "train",
        "seq_len": 64,
        "feature_converter": LanguageModelFeatures(reverse_bos_padding=True),
    },
}
# Their batches are nested or their generator's: they are asked in test files of their own.
APART = {MultiInput, PreferenceInput, LingvoInputAdaptor, LingvoInputAdaptorNewBatchSize, LingvoEvalAdaptor}
# What else a TextInput reads, and how else it packs.
TEXTS = {
    "jsonl": {"files": "*.jsonl.gz"},
    "parquet": {"files": "*.parquet"},
    "arrayrecord": {"files": "*.arrayrecord"},
    "tokens": {"files": "part-*.bin"},
    "foreign-tokens": {"files": "foreign.bin"},
    "first-fit": {"files": "*.txt", "packing": "first_fit"},
    "tokens-first-fit": {"files": "part-*.bin", "packing": "first_fit", "drop_longer_than": 100},
}
# Fields that are not 0 in rows of padding.
UNPADDED = ("segment_pos", "example_id")
# In training, each host reads its own shard, and a run resumes on the same number of hosts only.
SHARDED = (SeqIOInput,)


@pytest.fixture(scope="module", autouse=True)
def shuffle_once():
    """Grain shuffles few rows slowly, by trial: 2 ms for each of 20. Most inputs here have the same few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_shuffle_module, "index_shuffle", functools.cache(index_shuffle_module.index_shuffle))
        yield


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    texts = [" ".join(f"{i}:{word}" for word in range(1 + 13 * i % 29)) for i in range(20)]
    for i, text in enumerate(texts):
        (directory / f"{i}.txt").write_text(text, encoding="utf-8")
    write_formats(directory, texts)
    chats = [{"prompt": f"{i}: count", "response": " ".join(map(str, range(1 + 13 * i % 29)))} for i in range(60)]
    (directory / "chats").mkdir()
    (directory / "chats" / "all.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return directory


@pytest.fixture(scope="module")
def c4(tmp_path_factory):
    directory = tmp_path_factory.mktemp("c4")
    write_c4(directory, tokenized=True)  # as text, documents run on into each other in the order of a pass
    return C4(path=str(directory), tokenizer_path=f"{directory}/c4.model", tokenized=True)


# In the fast suite, those that TensorFlow reads have their own test files alone.
_ASKED = [
    *(pytest.param(kind, marks=pytest.mark.slow) if issubclass(kind, SHARDED) else kind for kind in KINDS),
    *TEXTS,
]


@pytest.fixture(params=_ASKED, ids=lambda kind: kind if isinstance(kind, str) else kind.__name__)
def make(request, text_dir, c4):
    """Makes an input of one kind that shares the global batch with `hosts` others."""
    if request.param is SeqIOInput:
        register()

    def build(hosts: int = 1, host: int = 0, **fields) -> BaseInput:
        if request.param in TEXTS:
            kind, fields = TextInput, {"seq_len": 16, **TEXTS[request.param], **fields}
            fields["files"] = [f"{text_dir}/{fields['files']}"]
        else:
            kind, fields = request.param, {**KINDS[request.param], **fields}
        if kind is TextInput:
            fields.setdefault("files", [f"{text_dir}/*.txt"])
        if kind is ChatInput:
            fields["files"] = [f"{text_dir}/chats/*.jsonl"]
        if kind is MixtureInput:
            files = ["1?.txt", "?.txt"]
            fields["inputs"] = [TextInput(files=[f"{text_dir}/{each}"]) for each in files]
        if kind is C4Input:
            fields["c4"] = c4
        sharding = {
            "batch_size": GLOBAL_BATCH // hosts,
            "num_infeed_hosts": hosts if hosts > 1 else 0,
            "infeed_host_index": host,
        }
        return kind(**sharding, **fields)

    return build


def take(data: BaseInput, count: int) -> list:
    return [data.get_next() for _ in range(count)]


def join(batches) -> dict[str, np.ndarray]:
    """The concatenated batches."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def read(batch) -> np.ndarray:
    """The model's input: token ids or images."""
    return batch.image if "image" in batch else batch.ids


def num_rows(data: BaseInput) -> int:
    """Number of rows in an epoch."""
    if (known := data.num_rows()) is not None:
        return known
    one = dataclasses.replace(data, is_training=False, repeat=None, **EPOCH)
    return sum(int(batch.eval_sample_weights.sum()) for batch in one.eval_batches())


def count_rows(batch) -> collections.Counter:
    return collections.Counter(
        row.tobytes() for row, weights in zip(read(batch), batch.weights, strict=True) if weights.any()
    )


def test_every_input_class_is_tested():
    found = set()
    for module in pkgutil.iter_modules(paxcli.inputs.__path__, "paxcli.inputs."):
        members = vars(importlib.import_module(module.name)).values()
        found |= {m for m in members if inspect.isclass(m) and issubclass(m, BaseInput) and not inspect.isabstract(m)}
    assert found == KINDS.keys() | APART


def test_spec_is_the_first_batch(make):
    data = make(is_training=True)
    spec, batch = data.element_spec(), data.get_next()
    assert spec.keys() == batch.keys()
    for name, array in batch.items():
        assert isinstance(array, np.ndarray)
        assert (spec[name].shape, spec[name].dtype) == (array.shape, array.dtype), name
        assert array.shape[0] == GLOBAL_BATCH
    assert_same(BaseInput.element_spec(data), make(is_training=True).element_spec())


@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
def test_an_epoch_over_hosts_equals_that_of_one_host(make, hosts):
    whole = list(make(**EPOCH).eval_batches())
    parts = [list(make(hosts, host, **EPOCH).eval_batches()) for host in range(hosts)]
    assert {len(part) for part in parts} == {len(whole)}
    for batch, *shares in zip(whole, *parts, strict=True):
        assert_same(batch, join(shares))
    weights = join(whole).get("eval_sample_weights", join(whole).weights)
    padding = weights.reshape(sum(len(batch.weights) for batch in whole), -1).any(axis=1) == 0
    assert all(not field[padding].any() for name, field in join(whole).items() if name not in UNPADDED)
    assert 0 < len(padding) - padding.sum() == num_rows(make(**EPOCH))


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_training_over_hosts_equals_that_of_one_host(make, hosts):
    if isinstance(make(), SHARDED):
        pytest.skip("test_seqio_input.py asks it whether its hosts read different examples, and all")
    whole = take(make(is_training=True), 12)
    parts = [take(make(hosts, host, is_training=True), 12) for host in range(hosts)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert_same(batch, join(shares))


def test_training_has_every_row_in_each_epoch_in_another_order(make):
    rows = join(make(**EPOCH).eval_batches())
    data = make(is_training=True)
    size = num_rows(make(**EPOCH))
    stream = join(take(data, -(-2 * size // GLOBAL_BATCH)))
    first, second = (jax.tree.map(lambda a, n=n: a[n * size : (n + 1) * size], stream) for n in (0, 1))
    if isinstance(data, MixtureInput):  # In shares of its own, so that an input may start over before another ends.
        counts = count_rows(stream)
        assert counts.keys() == count_rows(rows).keys() and counts != count_rows(rows)
        return
    if isinstance(
        data, (SyntheticInput, SyntheticImages)
    ):  # Its training rows are others than its eval rows, in the order of their number.
        assert count_rows(first) != count_rows(rows)
    else:
        assert count_rows(first) == count_rows(rows)
        assert not np.array_equal(read(first), read(second))
    assert count_rows(first) == count_rows(second)


def test_resumes_exactly_from_anywhere_on_any_number_of_hosts(make):
    whole = take(make(is_training=True), 30)
    chance = random.Random(0)
    # Those that read again what they had read take seconds for each.
    for _ in range(4 if isinstance(make(is_training=True), SHARDED) else 10):
        done = chance.randrange(28)
        data = make(is_training=True)
        take(data, done)
        state = json.loads(json.dumps(data.get_state()))
        hosts = 1 if isinstance(data, SHARDED) else chance.choice([1, 2, 3, 8])
        parts = [make(hosts, host, is_training=True) for host in range(hosts)]
        for part in parts:
            part.set_state(state)
        for expected in whole[done : done + 2]:
            assert_same(expected, join([part.get_next() for part in parts]))
    assert len(json.dumps(state)) < 200


def test_another_seed_gives_another_stream(make):
    same, other = make(is_training=True, input_random_seed=42), make(is_training=True, input_random_seed=7)
    batch = make(is_training=True).get_next()
    assert_same(batch, same.get_next())
    assert not np.array_equal(read(batch), read(other.get_next()))


def test_reset_starts_over(make):
    data = make(is_training=True)
    first = take(data, 3)
    data.reset()
    assert_same(first, take(data, 3))


def test_peek_does_not_advance(make):
    data, untouched = make(is_training=True), make(is_training=True)
    for _ in range(3):
        assert_same(data.peek(), data.peek())
        assert_same(data.peek(), untouched.peek())
        assert_same(data.get_next(), untouched.get_next())


def test_peek_at_the_end_is_none(make):
    data = make(**EPOCH)
    take(data, -(-num_rows(data) // GLOBAL_BATCH))
    assert data.peek() is None
    with pytest.raises(StopIteration):
        data.get_next()


class TestEvalTable:
    def test_reset_and_all_is_one_epoch_each_time(self, make):
        data = make(**EPOCH)
        assert_same(list(data.eval_batches()), list(data.eval_batches()))
        stopped = data.eval_batches()
        first = next(stopped)
        stopped.close()
        assert_same(first, next(data.eval_batches()))

    def test_without_reset_an_eval_takes_the_next_batches(self, make):
        data = make(eval_loop_num_batches=2)
        runs = [list(data.eval_batches()) for _ in range(3)]
        assert [len(run) for run in runs] == [2, 2, 2]
        assert_same([batch for run in runs for batch in run], take(make(), 6))

    def test_reset_with_a_number_of_batches_is_an_error(self, make):
        with pytest.raises(ConfigError, match="full epochs"):
            make(reset_for_eval=True, eval_loop_num_batches=2).eval_batches()

    def test_without_reset_a_number_of_batches_is_required(self, make):
        with pytest.raises(ConfigError, match="nothing restarts"):
            make(eval_loop_num_batches=None).eval_batches()

    @pytest.mark.parametrize("repeating", [{"repeat": True}, {"is_training": True}])
    def test_an_infinite_epoch_is_an_error(self, make, repeating):
        with pytest.raises(ConfigError, match="reset_for_eval=True needs"):
            make(**EPOCH, **repeating).validate()

    def test_running_out_is_an_error(self, make):
        data = make(eval_loop_num_batches=10_000, repeat=False)
        with pytest.raises(DataError, match="ended after"):
            collections.deque(data.eval_batches(), maxlen=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "name"),
        ({"batch_size": None}, "batch_size is None"),
        ({"infeed_host_index": 2, "num_infeed_hosts": 2}, "2 of 2 hosts"),
        ({"input_random_seed": -1}, "input_random_seed"),
        ({"eval_loop_num_batches": 0}, "eval_loop_num_batches must be at least 1 or null, not 0"),
        ({"batch_size": 0}, r"batch_size must be at least 1 \(examples\) or null, not 0"),
        ({"seq_len": None}, "seq_len is None"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_examples": None, "repeat": False}, "is infinite"),
    ],
)
def test_invalid_settings_are_named(fields, message):
    good = {"batch_size": 2, "seq_len": 4, "vocab_size": 8, "num_examples": 3}
    SyntheticInput(**good).validate()
    with pytest.raises(ConfigError, match=message):
        SyntheticInput(**{**good, **fields}).get_next()


def test_a_subclass_may_change_batches():
    class Doubled(SyntheticInput):
        def get_next(self):
            batch = super().get_next()
            batch.doubled = batch.ids * 2
            return batch

    data = Doubled(batch_size=2, seq_len=4, vocab_size=8)
    assert data.element_spec().doubled.shape == (2, 4)
    assert_same(data.peek().doubled, data.get_next().ids * 2)


def test_a_subclass_of_any_input_may_change_batches(make):
    data = make(is_training=True)

    class Doubled(type(data)):
        def get_next(self):
            batch = super().get_next()
            batch.doubled = 2 * next(iter(batch.values()))
            return batch

    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
    changed = Doubled(**fields)
    for _ in range(2):
        assert_same(changed.peek(), changed.peek())
        assert_same(changed.peek(), changed.get_next())
    plain = NestedMap({name: value for name, value in changed.peek().items() if name != "doubled"})
    assert len(plain) == len(changed.peek()) - 1
    take(data, 2)
    assert_same(plain, data.get_next())


@pytest.mark.skipif(importlib.util.find_spec("lingvo") is not None, reason="lingvo is installed")
def test_without_lingvo_the_error_names_the_package():
    with pytest.raises(MissingError, match="`lingvo`"):
        LingvoInputAdaptor(is_training=True).validate()


def test_tensorflows_end_of_data_is_the_end_of_data():
    """Like the custom inputs in Pax's documentation, which iterate over a `tf.data.Dataset`."""
    import tensorflow as tf

    class Dataset(BaseInput):
        def __post_init__(self):
            super().__post_init__()
            self.reset()

        def get_next(self):
            return NestedMap(ids=self._iterator.get_next().numpy())

        def reset(self):
            self._iterator = iter(tf.data.Dataset.range(10).batch(self.batch_size, drop_remainder=True))

    class Labelled(Dataset):
        def get_next(self):
            batch = super().get_next()
            batch.labels = batch.ids + 1
            return batch

    data = Labelled(batch_size=4, **EPOCH)
    for _ in range(2):
        assert [batch.labels.tolist() for batch in data.eval_batches()] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(DataError, match="ended after 2 of 3"):
        list(Labelled(batch_size=4, eval_loop_num_batches=3).eval_batches())


def test_synthetic_rows_can_be_learned():
    """Bigram counts predict new rows far better than chance."""
    data = SyntheticInput(batch_size=64, seq_len=128, vocab_size=64, is_training=True)
    counts = np.full((64, 64), 0.01)
    batch = join(take(data, 4))
    np.add.at(counts, (batch.ids, batch.labels), 1)
    fresh = data.get_next()
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    assert -log_probs[fresh.ids, fresh.labels].mean() < 0.4 * np.log(64)
