"""Batches and metrics of SeqIOInput, compared with SeqIO's own."""

from __future__ import annotations

import json
import sys
import warnings

import jax
import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.inputs import seqio_library
from paxcli.inputs.seqio_features import (
    LanguageModelFeatures,
    PackedLanguageModelFeatures,
    PackedSequenceModelFeatures,
    SequenceModelFeatures,
)
from paxcli.inputs.seqio_input import SeqIOInput
from tests.inputs.seqio_tasks import NUM_EXAMPLES, register

LENGTHS = {"inputs": 6, "targets": 12}
EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}


@pytest.fixture(scope="module", autouse=True)
def seqio():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return register()


def make(converter=None, **fields) -> SeqIOInput:
    fields = {"mixture_name": "pax_toy", "split_name": "train", "batch_size": 4} | fields
    lengths = {"task_feature_lengths": LENGTHS if fields["mixture_name"] == "pax_toy" else {"targets": 18}}
    return SeqIOInput(**lengths | fields, **{"feature_converter": converter} if converter else {})


def take(data: SeqIOInput, count: int) -> list:
    return [data.get_next() for _ in range(count)]


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", ["pax_toy", "pax_toy_lm"])
@pytest.mark.parametrize("pack", [True, False])
def test_rows_are_those_of_seqio(seqio, name, pack):
    """The first pass of training, in SeqIO's own order: shuffled, prefixed, packed."""
    data = make(LanguageModelFeatures(pack=pack, weights_on_targets_only=True), mixture_name=name, is_training=True)
    own = seqio.PrefixLMFeatureConverter(pack=pack) if name == "pax_toy" else seqio.LMFeatureConverter(pack=pack)
    expected = seqio.get_dataset(name, data.lengths, own, shuffle=True, seed=42, batch_size=4)
    count = 0
    for row in expected.as_numpy_iterator():
        batch = data.get_next()
        np.testing.assert_array_equal(batch.labels, row["decoder_target_tokens"])
        np.testing.assert_array_equal(batch.ids, row["decoder_input_tokens"])
        np.testing.assert_array_equal(batch.weights, row["decoder_loss_weights"])
        if pack:
            np.testing.assert_array_equal(batch.segment_ids, row["decoder_segment_ids"])
            np.testing.assert_array_equal(batch.segment_pos, row["decoder_positions"])
        if name == "pax_toy":
            np.testing.assert_array_equal(batch.inputs_indicator, row["decoder_causal_attention"])
        count += 1
    assert count > 5


@pytest.mark.parametrize("pack", [True, False])
def test_sequence_rows_are_those_of_seqio(seqio, pack):
    data = make(SequenceModelFeatures(pack=pack), is_training=True)
    own = seqio.EncDecFeatureConverter(pack=pack)
    for row in seqio.get_dataset("pax_toy", LENGTHS, own, shuffle=True, seed=42, batch_size=4).as_numpy_iterator():
        batch = data.get_next()
        np.testing.assert_array_equal(batch.source_ids, row["encoder_input_tokens"])
        np.testing.assert_array_equal(batch.ids, row["decoder_input_tokens"])
        np.testing.assert_array_equal(batch.labels, row["decoder_target_tokens"])
        np.testing.assert_array_equal(batch.weights, row["decoder_loss_weights"])
        if pack:
            np.testing.assert_array_equal(batch.source_segment_ids, row["encoder_segment_ids"])
            np.testing.assert_array_equal(batch.source_segment_pos, row["encoder_positions"])
            np.testing.assert_array_equal(batch.segment_ids, row["decoder_segment_ids"])
        else:
            np.testing.assert_array_equal(batch.source_segment_ids, row["encoder_input_tokens"] > 0)


@pytest.mark.parametrize("kind", ["language", "sequence"])
def test_stored_packed_rows_equal_rows_packed_now(seqio, kind):
    """A task whose examples are the rows that SeqIO packed."""
    own = seqio.PrefixLMFeatureConverter(pack=True) if kind == "language" else seqio.EncDecFeatureConverter(pack=True)
    rows = seqio.get_dataset("pax_toy", LENGTHS, own)
    features = {name: seqio.Feature(seqio.PassThroughVocabulary(300), add_eos=False) for name in rows.element_spec}
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: rows, splits=["train"])
    packed = seqio.Task("packed", source=source, preprocessors=[], output_features=features)
    lengths = {name: spec.shape[0] for name, spec in rows.element_spec.items()}
    before = {"language": PackedLanguageModelFeatures, "sequence": PackedSequenceModelFeatures}[kind]
    now = {"language": LanguageModelFeatures, "sequence": SequenceModelFeatures}[kind]
    data = make(before(), mixture_name=None, mixture_or_task=packed, task_feature_lengths=lengths, **EPOCH)
    assert data.element_spec().keys() == data.peek().keys()
    assert_same(list(data.eval_batches()), list(make(now(pack=True), **EPOCH).eval_batches()))


def test_weights_of_tokens():
    import tensorflow as tf

    row = {"inputs": [5, 6, 7], "targets": [-8, 9, 1]}
    ds = tf.data.Dataset.from_tensors({name: tf.constant(ids) for name, ids in row.items()})
    weights = {}
    for asked in (None, True, False):
        batch = next(
            LanguageModelFeatures(weights_on_targets_only=asked)(ds, {"inputs": 4, "targets": 4}).as_numpy_iterator()
        )
        np.testing.assert_array_equal(batch["labels"], [5, 6, 7, 8, 9, 1, 0, 0])
        weights[asked] = batch["weights"].tolist()
    assert weights == {None: [1, 1, 1, 0, 1, 1, 0, 0], True: [0, 0, 0, 0, 1, 1, 0, 0], False: [1, 1, 1, 1, 1, 1, 0, 0]}


def test_reversed_rows_have_each_token_at_its_position():
    """Packed or alone in a row, an example has the same labels and weights."""
    converters = [LanguageModelFeatures(pack=pack, reverse_bos_padding=True, eos_id=2) for pack in (False, True)]
    seen = []
    for converter in converters:
        found = {}
        for batch in make(converter, **EPOCH).eval_batches():
            for row in range(4):
                for segment in range(1, batch.segment_ids[row].max() + 1):
                    here = batch.segment_ids[row] == segment
                    ids, labels, weights, prefix = (
                        batch[name][row][here].tolist() for name in ("ids", "labels", "weights", "inputs_indicator")
                    )
                    assert labels == [*ids[1:], 2] and weights == [1.0] * (len(ids) - 1) + [0.0]
                    found[tuple(ids)] = prefix
        seen.append(found)
    assert seen[0] == seen[1] and len(seen[0]) == NUM_EXAMPLES


@pytest.mark.parametrize("hosts", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_hosts_together_train_on_every_example_once(hosts):
    """One epoch of each host; examples are identified by their first target, which is unique."""
    seen = []
    for host in range(hosts):
        sharding = {"num_infeed_hosts": hosts, "infeed_host_index": host, "batch_size": 1}
        data = make(LanguageModelFeatures(weights_on_targets_only=True), is_training=True, **sharding)
        while data.get_state()["pass"] == 0 and (batch := data.peek()) is not None:
            first = batch.labels[0, np.flatnonzero(batch.weights[0])[0]]
            data.get_next()
            if data.get_state()["pass"] == 0:
                seen.append(int(first))
    assert sorted(seen) == [3 + i for i in range(NUM_EXAMPLES)]


def test_a_position_of_other_settings_is_an_error():
    state = make(is_training=True).get_state()
    for other in ({"split_name": "validation"}, {"num_infeed_hosts": 2}, {"input_random_seed": 7}):
        with pytest.raises(DataError, match="was saved with"):
            make(is_training=True, **other).set_state(json.loads(json.dumps(state)))


def test_a_mixture_is_one_infinite_epoch():
    data = make(mixture_name="pax_mixture", is_training=True)
    whole = take(data, 60)
    assert data.get_state()["pass"] == 0 and data.get_state()["row"] == 240
    other = make(mixture_name="pax_mixture", is_training=True)
    other.set_state(data.get_state() | {"row": 120})
    assert_same(take(other, 5), whole[30:35])


def test_an_evaluation_may_be_limited():
    batches = list(make(eval_num_examples=6, **EPOCH).eval_batches())
    assert [batch.example_id.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert batches[1].eval_sample_weights.tolist() == [1, 1, 0, 0] and not batches[1].weights[2:].any()


def test_text_and_tokenizer():
    data = make(**EPOCH)
    batch = data.get_next()
    assert data.ids_to_strings(batch.labels, [3, 1, 1, 1])[0] == "3 3 104"
    tokenizer = data.text_tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (300, 0, 1)


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"mixture_name": "pax_toi"}, "task or mixture `pax_toi`", "pax_toy"),
        ({"mixture_or_task": object()}, "both are set", "Set one"),
        ({"mixture_name": None}, "neither is set", "Set one"),
        ({"split_name": None}, "split_name is None", "Set it"),
        ({"split_name": "trian"}, "no split `trian`", "train"),
        ({"task_feature_lengths": None}, "seq_len", "maximum length"),
        ({"task_feature_lengths": {"inputs": 0, "targets": 4}}, "task_feature_lengths.inputs must be at least 1", ""),
        ({"task_feature_lengths": {"target": 4}}, "target", "task"),
        ({"seq_len": 17}, "rows of .* have 18 tokens, but the model's maximum is 17", "max_seq_len"),
        ({"shuffle": True}, "never shuffled", "split"),
        ({"eval_num_examples": 0}, "eval_num_examples must be at least 1", ""),
        ({"vocab_size": 200}, "has 300 ids, but the model's vocab_size is 200", "vocab_size to 300"),
        ({**EPOCH, "repeat": True}, "reset_for_eval=True needs", "repeat"),
    ],
)
def test_invalid_settings_are_named(fields, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        make(**fields).check_data()
    assert hint in (caught.value.hint or "")


def test_an_id_beyond_the_vocabulary_is_an_error(seqio):
    source = seqio.TaskRegistry.get("pax_toy_lm").source
    feature = seqio.Feature(seqio.PassThroughVocabulary(50), add_eos=False)
    task = seqio.Task("lies", source=source, preprocessors=[], output_features={"targets": feature})
    data = make(mixture_name=None, mixture_or_task=task, task_feature_lengths={"targets": 18}, vocab_size=60, **EPOCH)
    with pytest.raises(DataError, match="the data has id 1.., but the model's vocab_size is 60"):
        data.check_data()


def test_ids_without_text_are_shown_as_numbers(seqio):
    feature = seqio.Feature(seqio.PassThroughVocabulary(50), add_eos=False)
    task = seqio.Task("ids_only", source=None, preprocessors=[], output_features={"targets": feature})
    data = make(mixture_name=None, mixture_or_task=task, **EPOCH)
    assert data.ids_to_strings(np.array([[3, 4, 5]]), [2]) == ["3 4"]


def test_without_seqio(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    seqio_library.load.cache_clear()
    try:
        with pytest.raises(MissingError, match="need the package `seqio`") as caught:
            make().validate()
        assert caught.value.exit_code == 3 and "pip install seqio" in caught.value.hint
    finally:
        seqio_library.load.cache_clear()


def test_a_task_without_targets_has_no_tokenizer(seqio):
    feature = seqio.Feature(seqio.PassThroughVocabulary(50), add_eos=False)
    task = seqio.Task("no_targets", source=None, preprocessors=[], output_features={"ids": feature})
    with pytest.raises(ConfigError, match="its task has no feature `targets`"):
        _ = make(mixture_name=None, mixture_or_task=task, **EPOCH).text_tokenizer
