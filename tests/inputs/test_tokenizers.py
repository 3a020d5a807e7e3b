from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError, DataError, PaxError
from paxcli.inputs import token_files, tokenizing
from paxcli.inputs.documents import BadRecords, Reading
from paxcli.inputs.files import SourceFile
from paxcli.inputs.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, TiktokenTokenizer

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


@pytest.fixture(scope="module")
def byte_pairs():
    """A byte-level BPE of the `tokenizers` library, which splits text into words by Llama 3's pattern."""
    import tokenizers

    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.Regex(TiktokenTokenizer.pattern)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(words, "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([Path(__file__).read_text()], trainer)
    return library


@pytest.fixture
def ranks_file(byte_pairs, tmp_path):
    """The same vocabulary in tiktoken's format. GPT-2's alphabet has a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    by_id = sorted((number, token) for token, number in byte_pairs.get_vocab().items())
    lines = [
        b"%s %d" % (base64.b64encode(bytes(bytes_of[character] for character in token)), number)
        for number, token in by_id
    ]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize(
    "text",
    [TEXT, "naïve ☃ 雪 — 12345 don't\r\n\n  x", "def f(a):\n    return a", "", " \t ", Path(__file__).read_text()],
)
def test_tiktoken_gives_the_ids_of_the_same_byte_pairs(text, byte_pairs, ranks_file):
    tokenizer = TiktokenTokenizer(path=str(ranks_file))
    ids = tokenizer.encode(text)
    assert ids.tolist() == byte_pairs.encode(text).ids
    assert tokenizer.decode(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id])) == text


def test_tiktoken_encodes_long_whitespace(ranks_file):
    tokenizer = TiktokenTokenizer(path=str(ranks_file))
    text = "a" + " " * 1_000_000 + "b"  # tiktoken itself ends with a panic
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids, offsets = tokenizer.encode_chat(text)
    assert ids.tolist() == tokenizer.encode(text).tolist() and offsets[-1, 1] == len(text)


def test_tiktoken_has_the_special_tokens_of_llama_3_or_others(ranks_file):
    tokenizer = TiktokenTokenizer(path=str(ranks_file))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (400 + 256, 400, 401)
    turn = "<|start_header_id|>user<|end_header_id|>hi<|eot_id|>"
    ids = tokenizer.encode_chat(turn)[0].tolist()
    # As in Llama 3.1, where <|begin_of_text|> is 128000.
    assert [number - 400 for number in ids if number >= 400] == [6, 7, 9]
    assert tokenizer.encode(turn).max() < 400
    own = TiktokenTokenizer(path=str(ranks_file), added_tokens=("<a>", "<b>"), eos_token="<b>", bos_token=None)
    assert (own.vocab_size, own.bos_id, own.eos_id) == (402, None, 401)
    with pytest.raises(DataError, match="no special token `<c>`"):
        _ = TiktokenTokenizer(path=str(ranks_file), eos_token="<c>").eos_id
    with pytest.raises(ConfigError, match="not a regular expression"):
        _ = TiktokenTokenizer(path=str(ranks_file), pattern="(").vocab_size


@pytest.mark.parametrize("text", ["", "a b", "YQ== 0\nYg== 2\n", "!!! 0\n", "YQ== x\n"])
def test_a_file_that_has_no_ranks(text, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text(text)
    with pytest.raises(DataError, match="is not a tiktoken file"):
        _ = TiktokenTokenizer(path=str(path)).vocab_size


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>", "pad_token": {"content": "<pad>"}}}, ("</s>", None, "<pad>")),
        ({"special_tokens_map.json": {"eos_token": "</s>", "bos_token": "the"}}, ("</s>", None, None)),
        ({"config.json": {"eos_token_id": [1, 2], "pad_token_id": 0}}, ("</s>", None, "<pad>")),
        ({"tokenizer_config.json": {"eos_token": "<unknown>"}}, (None, None, None)),
    ],
)
def test_a_directory_names_its_special_tokens(files, expected, hugging_face_file):
    for name, content in files.items():
        hugging_face_file.with_name(name).write_text(json.dumps(content))
    values = resolve("tiny", sets=[f"tokenizer=hf:{hugging_face_file.parent}"]).values
    named = tuple(values[f"train_input.tokenizer.{token}_token"].value for token in ("eos", "bos", "pad"))
    assert named == expected


def test_one_setting_names_the_tokenizer_of_all_inputs(hugging_face_file, sentencepiece_model, ranks_file):
    hugging_face_file.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    kinds = {
        "byte": ("ByteTokenizer", {}),
        f"hf:{hugging_face_file.parent}": (
            "HuggingFaceTokenizer",
            {"path": str(hugging_face_file), "eos_token": "</s>"},
        ),
        f"spm:{sentencepiece_model}": ("SentencePieceTokenizer", {"path": str(sentencepiece_model)}),
        f"tiktoken:{ranks_file}": ("TiktokenTokenizer", {"path": str(ranks_file)}),
    }
    for short, (name, fields) in kinds.items():
        resolved = resolve("tiny", sets=[f"tokenizer={short}"])
        values = {"": name, **{f".{field}": value for field, value in fields.items()}}
        paths = [f"{one}.tokenizer" for one in ("train_input", "eval_inputs.0")]
        assert resolved.sets == {path + field: value for path in paths for field, value in values.items()}
        # What a run records gives the same recipe again.
        assert resolve("tiny", sets=resolved.sets).values == resolved.values
        only_one = resolve("tiny", sets={"train_input.tokenizer": short})
        assert {path.partition(".")[0] for path in only_one.sets} == {"train_input"}


@pytest.mark.parametrize(
    "others", [["train_input=TextInput"], ["eval_inputs=[]", "train_input=TextInput"], ["eval_inputs=[TextInput]"]]
)
def test_the_order_of_the_tokenizer_and_the_inputs_is_free(others, ranks_file):
    tokenizer = f"tokenizer=tiktoken:{ranks_file}"
    after, before = resolve("tiny", sets=[*others, tokenizer]), resolve("tiny", sets=[tokenizer, *others])
    assert after.values == before.values
    assert after.values["train_input.tokenizer"].value == "TiktokenTokenizer"
    assert resolve("tiny", sets=before.sets).values == before.values


def test_a_tokenizer_for_inputs_that_another_setting_removes():
    with pytest.raises(ConfigError, match="no field `tokenizer`"):
        resolve("tiny", sets=["tokenizer=byte", "eval_inputs=[]", "train_input=SyntheticInput"])
    with pytest.raises(ConfigError, match="after `train_input.tokenizer.bos_token`"):
        resolve("tiny", sets=["tokenizer=tiktoken:x", "train_input.tokenizer.bos_token=a", "train_input=TextInput"])


@pytest.mark.parametrize(
    ("short", "problem"),
    [
        ("bytes", "expected one of .*TiktokenTokenizer, byte, hf:DIR, spm:FILE, tiktoken:FILE, got 'bytes'"),
        ("hf:", "expected one of"),
        ("hf:missing", "no tokenizer file missing/tokenizer.json"),
    ],
)
def test_a_wrong_short_form(short, problem):
    with pytest.raises(PaxError, match=problem):
        resolve("tiny", sets=[f"tokenizer={short}"])


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


def test_texts_in_batches_have_the_ids_of_single_ones(
    sentencepiece_model, hugging_face_file, ranks_file, tmp_path, monkeypatch
):
    texts = [TEXT, "the dog", TEXT * 2, "fox", "jumps over"]
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for characters in (1, 10, 50, 10_000):
        monkeypatch.setattr(tokenizing, "_BATCH_CHARACTERS", characters)
        for tokenizer in (
            ByteTokenizer(),
            SentencePieceTokenizer(path=str(sentencepiece_model)),
            HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="</s>"),
            TiktokenTokenizer(path=str(ranks_file)),
        ):
            job = tokenizing.Tokenizing(Reading(), lambda tokenizer=tokenizer: tokenizer)
            file = SourceFile("texts.jsonl", epath.Path(lines))
            found = [ids.tolist() for ids in job.tokenize([file], tokenizer, BadRecords())]
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            assert found == [[*first, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]


def test_a_chat_keeps_special_tokens_and_the_characters_of_each_token(
    sentencepiece_model, hugging_face_file, ranks_file
):
    tokenizers = [
        (ByteTokenizer(), "naïve ☃"),
        (SentencePieceTokenizer(path=str(sentencepiece_model)), TEXT),
        (HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="dog"), TEXT),
        (TiktokenTokenizer(path=str(ranks_file)), "naïve ☃"),
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


def test_the_truncation_and_padding_of_the_last_call_in_transformers_are_ignored(hugging_face_file):
    """It writes both into `tokenizer.json`."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(hugging_face_file))
    library.enable_truncation(2)
    library.enable_padding(length=20)
    library.save(str(hugging_face_file))
    tokenizer = HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="</s>")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and len(tokenizer.encode_chat(TEXT)[0]) == 9


def test_ids_that_a_vocabulary_skips_count(hugging_face_file):
    content = json.loads(hugging_face_file.read_text())
    vocab = content["model"]["vocab"]
    vocab["<last>"] = last = len(vocab) + 70_000
    hugging_face_file.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(path=str(hugging_face_file), eos_token="<last>")
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (last, last + 1)
    assert token_files.TokenFileInfo.of(tokenizer).dtype == "uint32"
