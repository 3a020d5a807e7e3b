from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxcli.errors import DataError
from paxcli.inputs.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert ((ids >= 3) & (ids < tokenizer.vocab_size)).all()
    assert tokenizer.decode(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id])) == text


def test_invalid_utf8_decodes_to_replacement_characters():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(np.array([ord("a") + 3, 0xFF + 3, 259, 511])) == "a\ufffd\ufffd\ufffd"


@pytest.fixture
def sentencepiece_model(tmp_path):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20), model_writer=model, vocab_size=31, minloglevel=2
    )
    path = tmp_path / "text.model"
    path.write_bytes(model.getvalue())
    return path


def test_sentencepiece(sentencepiece_model):
    tokenizer = SentencePieceTokenizer(path=str(sentencepiece_model))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (31, 0, 1, 2)


@pytest.fixture
def hugging_face_file(tmp_path):
    import tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "</s>", *sorted(set(TEXT.split()))])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


def test_hugging_face(hugging_face_file):
    tokenizer = HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="</s>")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (10, 0, None, 1)
    with pytest.raises(DataError, match="`<eos>`"):
        _ = HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="<eos>").eos_id


@pytest.mark.parametrize(
    "make",
    [lambda path: SentencePieceTokenizer(path=path), lambda path: HuggingFaceTokenizer(path=path, eos_token="a")],
)
def test_missing_and_wrong_tokenizer_files_are_named(make, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("{}")
    for path in (str(wrong), str(Path(tmp_path, "missing"))):
        with pytest.raises(DataError, match=path):
            _ = make(path).vocab_size


def test_a_chat_keeps_special_tokens_and_the_characters_of_each_token(sentencepiece_model, hugging_face_file):
    tokenizers = [
        (ByteTokenizer(), "naïve ☃"),
        (SentencePieceTokenizer(path=str(sentencepiece_model)), TEXT),
        (HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="dog"), TEXT),
    ]
    for tokenizer, text in tokenizers:
        eos = tokenizer.special_tokens["eos_token"]
        ids, offsets = tokenizer.encode_chat(f"{text} {eos} {text}")
        assert (ids.dtype, offsets.shape) == (np.int32, (len(ids), 2))
        (here,) = np.nonzero(ids == tokenizer.eos_id)
        start = len(text) + 1
        assert [start, start + len(eos)] in offsets[here].tolist()
        before = ids[offsets[:, 1] < start]
        assert tokenizer.decode(before).strip() == text
        assert (np.diff(offsets, axis=0) >= 0).all() and offsets[-1, 1] == 2 * len(text) + len(eos) + 2
