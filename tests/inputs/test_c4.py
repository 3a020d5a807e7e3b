"""C4 preprocessed like in Pax's recipes, and errors of its files."""

from __future__ import annotations

import gzip
import importlib.resources.abc
import json
import sys
import zlib

import numpy as np
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.c4 import C4, C4Input
from paxcli.inputs.seqio_library import load
from tests.inputs.seqio_tasks import write_c4

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("c4")
    return directory, write_c4(directory)


@pytest.fixture(scope="module")
def encode(files):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(files[0] / "c4.model")).encode


def c4(directory, **fields) -> C4:
    return C4(**{"path": str(directory), "tokenizer_path": f"{directory}/c4.model"} | fields)


def make(data: C4, **fields) -> C4Input:
    return C4Input(c4=data, **{"batch_size": 8, "seq_len": 64, "vocab_size": 260} | fields)


def test_an_evaluation_reads_every_token_once_and_in_order(files, encode):
    directory, texts = files
    tokens = [token for text in texts for token in encode(text)]
    batches = list(make(c4(directory), **EPOCH).eval_batches())
    ids = np.concatenate([batch.ids for batch in batches])
    segments = np.concatenate([batch.segment_ids for batch in batches])
    assert ids[segments > 0].tolist() == tokens
    labels, weights = (np.concatenate([batch[name] for batch in batches]) for name in ("labels", "weights"))
    np.testing.assert_array_equal(labels[:, :-1][weights[:, :-1] > 0], ids[:, 1:][weights[:, :-1] > 0])
    full = segments.all(axis=1)
    assert full.sum() == len(tokens) // 64
    assert (labels[full, -1] == 1).all() and not weights[full, -1].any() and weights[full, :-1].all()


def test_training_reads_every_token_once_per_epoch(files, encode):
    """In runs of a row each, whatever the order of the files."""
    data = make(c4(files[0]), is_training=True, batch_size=1)
    seen = []
    while True:
        batch = data.get_next()
        if data.get_state()["pass"]:
            break
        seen += batch.ids[batch.segment_ids > 0].tolist()
    lines = [line for file in files[0].glob("*train*") for line in gzip.open(file, "rt")]
    assert sorted(seen) == sorted(token for line in lines for token in encode(json.loads(line)["text"]))


def test_sequences_that_are_tokens_already(tmp_path, encode):
    texts = write_c4(tmp_path, tokenized=True)
    batches = list(make(c4(tmp_path, tokenized=True), **EPOCH).eval_batches())
    rows = [
        row[segments > 0].tolist()
        for batch in batches
        for row, segments in zip(batch.ids, batch.segment_ids, strict=True)
    ]
    expected = [encode(text)[start : start + 64] for text in texts for start in range(0, len(encode(text)), 64)]
    assert [row for row in rows if row] == expected


def test_tensorflow_datasets(tmp_path, files, monkeypatch):
    """The same documents out of TensorFlow Datasets make the same rows."""
    # To write a dataset (not to read one) the library imports this, which it does not require.
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    tf, tfds = load("tensorflow"), load("tensorflow_datasets")
    records = tf.data.Dataset.from_tensor_slices({"text": files[1]})
    tfds.dataset_builders.store_as_tfds_dataset(
        "c4",
        version="3.0.1",
        config="en",
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        split_datasets={"validation": records},
        data_dir=str(tmp_path),
        disable_shuffling=True,
    )
    there = c4(files[0], path=str(tmp_path), tfds_name="c4/en:3.0.1")
    batches = [list(make(data, **EPOCH).eval_batches()) for data in (there, c4(files[0]))]
    for one, other in zip(*batches, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


GOOD = b'{"text": "a b c", "timestamp": "", "url": ""}\n'
_writer = zlib.compressobj(wbits=31)
CUT = _writer.compress(GOOD * 7) + _writer.flush(zlib.Z_FULL_FLUSH)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD + b"{oops\n"), r"c4-train\.0\.json\.gz, line 2 is not JSON"),
        (gzip.compress(GOOD + b'{"text": ' + b"[" * 100_000), r"c4-train\.0\.json\.gz, line 2 is not JSON"),
        (gzip.compress(GOOD + b'{"txt": "a"}\n'), r"c4-train\.0\.json\.gz, line 2 has no text"),
        (gzip.compress(GOOD + b'{"text": 5}\n'), r"c4-train\.0\.json\.gz, line 2 has no text"),
        (
            gzip.compress(GOOD * 100)[:-9],
            r"c4-train\.0\.json\.gz is truncated: its compressed data ends after line \d+",
        ),
        (CUT, r"c4-train\.0\.json\.gz is truncated: its compressed data ends after line 7"),
        (GOOD, r"c4-train\.0\.json\.gz is damaged after line 0"),
        (gzip.compress(b""), "no example"),
        (b"", r"c4-train\.0\.json\.gz is truncated: it has 0 bytes"),
    ],
    ids=["json", "deep", "field", "number", "truncated", "truncated at a line", "not gzip", "empty", "no bytes"],
)
def test_a_damaged_file_is_named(files, tmp_path, content, message):
    (tmp_path / "c4-train.0.json.gz").write_bytes(content)
    data = c4(tmp_path, tokenizer_path=f"{files[0]}/c4.model")
    with pytest.raises(DataError, match=message):
        make(data, is_training=True).check_data()


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"path": None}, ConfigError, "path is None"),
        ({"tokenizer_path": None}, ConfigError, "tokenizer_path is None"),
        ({"path": "/nowhere"}, DataError, "No file matches /nowhere"),
        ({"tokenizer_path": "/nowhere.model"}, DataError, "no tokenizer file /nowhere.model"),
        ({"tokenizer_path": __file__}, DataError, "is not a SentencePiece model"),
    ],
)
def test_missing_data_is_named(files, fields, kind, message):
    with pytest.raises(kind, match=message):
        make(c4(files[0], **fields), is_training=True).check_data()


def test_a_tokenizer_larger_than_the_model(files):
    with pytest.raises(ConfigError, match="has 260 ids, but the model's vocab_size is 200") as caught:
        make(c4(files[0]), vocab_size=200, is_training=True).check_data()
    assert "vocab_size to 260" in caught.value.hint


def test_a_tokenizer_without_padding(files, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(files[1]), model_prefix=str(tmp_path / "other"), vocab_size=200, minloglevel=2
    )
    with pytest.raises(ConfigError, match="id 0 for the unknown token"):
        make(c4(files[0], tokenizer_path=str(tmp_path / "other.model")), is_training=True).check_data()
