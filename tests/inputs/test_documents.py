"""Every file format gives the same documents, and errors name the file and the record."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.text import TextInput
from tests.inputs.formats import write_array_record, write_formats, write_jsonl

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 4, "seq_len": 16}
TEXTS = ["first", "second: naïve ☃", "x" * 40, "last"]


def text_input(*files, **fields) -> TextInput:
    return TextInput(**{"files": [str(file) for file in files], **EPOCH, **fields})


def tokens(data: TextInput) -> np.ndarray:
    """Ids and labels of an epoch, without padding [2, N]."""
    batches = list(data.eval_batches())
    return np.concatenate([np.stack([batch.ids, batch.labels])[:, batch.weights > 0] for batch in batches], axis=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    for i in range(40):
        (directory / f"{i:02}.txt").write_text(TEXTS[i % 4])
    write_formats(directory, TEXTS * 10)
    return directory


@pytest.mark.parametrize(
    "files",
    [
        "all.jsonl.gz",
        "all.json",
        "all.jsonl.xz",
        "all.ndjson.zst",
        "all.parquet",
        "all.arrayrecord",
        "foreign.bin",
        "part-*.bin",
    ],
)
@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_every_format_has_the_same_documents(directory, files, packing):
    plain = text_input(directory / "*.txt", packing=packing)
    data = text_input(directory / files, packing=packing)
    if files != "part-*.bin":  # rows do not span several token files
        for batch, expected in zip(data.eval_batches(), plain.eval_batches(), strict=True):
            for name in expected:
                np.testing.assert_array_equal(batch[name], expected[name])
    np.testing.assert_array_equal(np.sort(tokens(data)), np.sort(tokens(plain)))


def test_processes_tokenize_to_the_same(directory):
    one, two = (text_input(directory / "*.txt", directory / "all.jsonl.gz", num_workers=n) for n in (0, 2))
    np.testing.assert_array_equal(tokens(one), tokens(two))
    assert one.data_fingerprint() == two.data_fingerprint()


def test_array_record_of_text_and_of_examples(tmp_path):
    import tensorflow as tf

    def example(text: str) -> bytes:
        feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        return tf.train.Example(features=tf.train.Features(feature={"text": feature})).SerializeToString()

    write_array_record(tmp_path / "raw.arrayrecord", [text.encode() for text in TEXTS])
    write_array_record(tmp_path / "examples.array_record", [example(text) for text in TEXTS])
    raw = tokens(text_input(tmp_path / "raw.arrayrecord", text_field=None))
    np.testing.assert_array_equal(raw, tokens(text_input(tmp_path / "examples.array_record")))


def test_format_overrules_the_suffix(tmp_path):
    write_jsonl(tmp_path / "lines.txt", TEXTS)
    write_jsonl(tmp_path / "lines.jsonl", TEXTS)
    data = text_input(tmp_path / "lines.txt", format="jsonl")
    np.testing.assert_array_equal(tokens(data), tokens(text_input(tmp_path / "lines.jsonl")))


def test_documents_that_are_too_long_are_dropped_and_counted(directory):
    data = text_input(directory / "all.jsonl.gz", drop_longer_than=20)
    assert data.corpus.num_dropped == 10
    assert (tokens(data)[0] == 2).sum() == 30
    of_tokens = text_input(directory / "foreign.bin", drop_longer_than=20)
    np.testing.assert_array_equal(tokens(data), tokens(of_tokens))
    assert of_tokens.corpus.num_dropped == 10


class TestBadRecords:
    LINES = ['{"text": "good"}', "{broken", '{"txt": "no"}', '["text"]', '{"text": 3}', "", '{"text": "fine"}']

    def write(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes("\n".join(self.LINES).encode() + b'\n{"text": "\xff"}\n')
        return tmp_path / "a.jsonl"

    def test_first_is_an_error_that_names_its_line(self, tmp_path):
        with pytest.raises(DataError, match=r"a.jsonl, line 2 is not JSON"):
            text_input(self.write(tmp_path)).check_data()

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_skipped_are_counted(self, tmp_path, num_workers):
        data = text_input(self.write(tmp_path), on_bad_record="skip", bad_record_budget=5, num_workers=num_workers)
        (text,) = data.ids_to_strings(tokens(data)[:1], [12])
        assert text == "goodfine"
        places = [record.split(", line ")[1].split()[0].rstrip(":") for record in data.corpus.bad_records]
        assert places == ["2", "3", "4", "5", "8"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"text": "half a smile \\ud83d"}', r"line 2 has the escape \\ud83d"),
            ('{"text": "ok", "more": [{"\\udc00": 1}]}', r"line 2 has the escape \\udc00"),
            ('{"text": ' + "[" * 100_000, "line 2 is not JSON"),
        ],
    )
    def test_half_a_character_and_deep_nesting(self, tmp_path, line, message):
        smile = '{"text": "\\ud83d\\ude00"}'
        (tmp_path / "a.jsonl").write_text(f"{smile}\n{line}\n")
        with pytest.raises(DataError, match=message):
            text_input(tmp_path / "a.jsonl").check_data()
        data = text_input(tmp_path / "a.jsonl", on_bad_record="skip", bad_record_budget=1)
        (text,) = data.ids_to_strings(tokens(data)[:1], [5])
        assert text == "😀" and len(data.corpus.bad_records) == 1

    @pytest.mark.parametrize(
        "content", [b'{"text": "half\xed\xa0\x80"}', '{"text": "two bytes each"}'.encode("utf-16")]
    )
    def test_lines_that_are_not_utf8(self, tmp_path, content):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(DataError, match="a.jsonl, line 1 is not UTF-8"):
            text_input(tmp_path / "a.jsonl").check_data()

    @pytest.mark.parametrize(
        "suffix,content",
        [
            ("json", '{"text": "first"}\n{"text": "last"}'),
            ("json", '[{"text": "first"},\n {"text": "last"}]'),
            ("txt", "first"),
        ],
    )
    def test_a_byte_order_mark_is_left_out(self, tmp_path, suffix, content):
        plain, marked = tmp_path / f"a.{suffix}", tmp_path / f"marked.{suffix}"
        plain.write_text(content)
        marked.write_text(content, encoding="utf-8-sig")
        np.testing.assert_array_equal(tokens(text_input(marked)), tokens(text_input(plain)))

    @pytest.mark.parametrize("indent", [None, 1])
    def test_a_file_of_one_array_is_read_as_lines(self, tmp_path, indent):
        records = [{"text": "good"}, {"text": "fine"}, {"txt": "bad"}, {"text": "\ud83d"}]
        (tmp_path / "a.json").write_text(json.dumps(records, indent=indent))
        (tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        array, lines = (text_input(tmp_path / name, on_bad_record="skip") for name in ("a.json", "b.jsonl"))
        np.testing.assert_array_equal(tokens(array), tokens(lines))
        assert [record.rpartition("a.json, ")[2].split()[0:2] for record in array.corpus.bad_records] == [
            ["item", "2:"],
            ["item", "3"],
        ]

    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
    @pytest.mark.parametrize(
        "content", [b'{"text": "a"}\n\r\n{"text": "b"}\r\n', b'[{"text": "a"},\n\n {"text": "b"}]']
    )
    def test_blank_lines_are_no_records(self, tmp_path, mark, content):
        (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}')
        (tmp_path / "b.jsonl").write_bytes(mark + b" \r\n\n" + content)
        (tmp_path / "marked.jsonl").write_bytes(mark)
        lines = tokens(text_input(tmp_path / "a.jsonl"))
        np.testing.assert_array_equal(tokens(text_input(tmp_path / "b.jsonl", tmp_path / "marked.jsonl")), lines)

    def test_an_array_of_deep_nesting_is_an_error(self, tmp_path):
        (tmp_path / "a.json").write_text('[{"text": "a", "more": ' + "[" * 100_000)
        with pytest.raises(DataError, match="a.json is not a JSON array"):
            text_input(tmp_path / "a.json").check_data()

    def test_an_array_that_does_not_end_is_an_error(self, tmp_path):
        (tmp_path / "a.json").write_text('[{"text": "good"},\n')
        with pytest.raises(DataError, match="a.json is not a JSON array"):
            text_input(tmp_path / "a.json", on_bad_record="skip").check_data()

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_too_many_are_an_error(self, tmp_path, num_workers):
        data = text_input(self.write(tmp_path), on_bad_record="skip", bad_record_budget=4, num_workers=num_workers)
        with pytest.raises(DataError, match="More than 4 records cannot be read. The last one: .*line 8"):
            data.check_data()

    def test_null_in_parquet_names_its_row(self, tmp_path):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"a.parquet, row 1: `text` is null"):
            text_input(tmp_path / "a.parquet").check_data()

    def test_record_of_an_array_record_is_named(self, tmp_path):
        write_array_record(tmp_path / "a.arrayrecord", [b'{"text": "good"}', b"\nno example", b'{"text": "fine"}'])
        with pytest.raises(DataError, match="a.arrayrecord, record 1 is neither"):
            text_input(tmp_path / "a.arrayrecord").check_data()
        data = text_input(tmp_path / "a.arrayrecord", on_bad_record="skip")
        assert len(data.corpus.bad_records) == 1

    def test_a_text_file_is_one_record(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes(b"\xff")
        (tmp_path / "good.txt").write_text("good")
        data = text_input(tmp_path / "*.txt", on_bad_record="skip")
        assert tokens(data).shape == (2, 5)
        assert "latin.txt" in data.corpus.bad_records[0]


class TestBadFiles:
    def check(self, message: str, file, error=DataError, **fields) -> None:
        for policy in ("error", "skip"):  # How much is missing of a damaged file is unknown, so it cannot be skipped.
            with pytest.raises(error, match=message):
                text_input(file, on_bad_record=policy, **fields).check_data()

    def test_truncated_gzip(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl.gz", TEXTS * 1000)
        whole = (tmp_path / "a.jsonl.gz").read_bytes()
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:-20])
        self.check(r"a.jsonl.gz is truncated: its compressed data ends after line \d+", tmp_path / "a.jsonl.gz")
        (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
        self.check("a.jsonl.gz is damaged after line 0", tmp_path / "a.jsonl.gz")
        (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 100)[:-4])
        self.check("b.txt.gz is truncated", tmp_path / "b.txt.gz")
        (tmp_path / "c.jsonl.gz").write_bytes(b"")  # as an interrupted download leaves it, among others
        self.check("c.jsonl.gz is truncated: it has 0 bytes", tmp_path / "c.jsonl.gz")

    @pytest.mark.parametrize("suffix", ["xz", "zst"])
    def test_other_compressions(self, suffix, tmp_path):
        write_jsonl(tmp_path / f"a.jsonl.{suffix}", TEXTS * 1000)
        whole = (tmp_path / f"a.jsonl.{suffix}").read_bytes()
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(whole[:-5])
        self.check(rf"a.jsonl.{suffix} is truncated", tmp_path / f"a.jsonl.{suffix}")
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(b"no archive")
        self.check(f"a.jsonl.{suffix} is damaged after line 0", tmp_path / f"a.jsonl.{suffix}")

    def test_an_array_of_other_things_is_no_record(self, tmp_path):
        (tmp_path / "a.json").write_text('["a"]')
        with pytest.raises(DataError, match="a.json, line 1 is a JSON list, not an object"):
            text_input(tmp_path / "a.json").check_data()

    def test_parquet(self, tmp_path):
        pyarrow.parquet.write_table(pyarrow.table({"txt": ["a"], "number": [1]}), tmp_path / "a.parquet")
        self.check("no column `text`; it has txt, number", tmp_path / "a.parquet")
        self.check("column `number` has type int64", tmp_path / "a.parquet", text_field="number")
        whole = (tmp_path / "a.parquet").read_bytes()
        length = int.from_bytes(whole[-8:-4], "little")  # of the footer
        (tmp_path / "c.parquet").write_bytes(whole[: -8 - length] + b"\xff" * length + whole[-8:])
        self.check("c.parquet is not a Parquet file", tmp_path / "c.parquet")
        (tmp_path / "b.parquet").write_bytes(b"nonsense")
        self.check("b.parquet is not a Parquet file", tmp_path / "b.parquet")

    @pytest.mark.parametrize(
        "kind",
        [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
        ids=str,
    )
    def test_parquet_with_other_types_of_text(self, kind, tmp_path):
        """Those that polars, and `datasets` and pandas for repeated texts, write."""
        texts = pyarrow.array([*TEXTS, TEXTS[0]])
        of_kind = texts.dictionary_encode() if pyarrow.types.is_dictionary(kind) else texts.cast(kind)
        for name, column in {"a": texts, "b": of_kind}.items():
            pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}.parquet")
        assert pyarrow.parquet.read_schema(tmp_path / "b.parquet").field("text").type == kind
        np.testing.assert_array_equal(*(tokens(text_input(tmp_path / f"{name}.parquet")) for name in ("a", "b")))

    def test_parquet_with_checksums_of_pages(self, tmp_path):
        table = pyarrow.table({"text": [f"number {i}" for i in range(100)]})
        options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **options)
        content = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "a.parquet").write_bytes(content.replace(b"number 57", b"number 17"))
        self.check("a.parquet is damaged after row 0: .*checksum", tmp_path / "a.parquet")

    def test_array_record(self, tmp_path):
        path = tmp_path / "a.arrayrecord"
        path.write_bytes(b"nonsense" * 100)
        self.check("a.arrayrecord", path)
        write_array_record(path, [json.dumps({"text": text}).encode() for text in TEXTS])
        whole = path.read_bytes()
        for damaged in (whole[:1000], whole[: 2**16], whole[:-1], whole[:70] + b"\0" + whole[71:]):
            path.write_bytes(damaged)
            self.check("a.arrayrecord is damaged, or is not an ArrayRecord file: RuntimeError", path)

    def test_an_array_record_that_crashes_its_reader(self, tmp_path, monkeypatch):
        write_array_record(tmp_path / "a.arrayrecord", [json.dumps({"text": text}).encode() for text in TEXTS])
        (tmp_path / "crash").mkdir()
        (tmp_path / "crash" / "sitecustomize.py").write_text(
            "import os, signal, threading\nthreading.Timer(0, lambda: os.kill(os.getpid(), signal.SIGSEGV)).start()\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "crash"))
        self.check("a.arrayrecord is damaged.* reading it ends a process", tmp_path / "a.arrayrecord")

    def test_token_files_mixed_with_other_formats(self, directory):
        with pytest.raises(ConfigError, match="token file, but `files` also has other formats"):
            text_input(directory / "*.txt", directory / "*.bin").check_data()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "json"}, "format must be one of text, jsonl, .*, not json"),
        ({"packing": None}, "packing must be one of .*, not None"),
        ({"on_bad_record": "skp"}, "on_bad_record must be one of error, skip, not skp"),
        ({"bad_record_budget": -1}, "bad_record_budget must be at least 0, not -1"),
        ({"num_workers": -1}, "num_workers must be at least 0, not -1"),
        ({"drop_longer_than": 0}, "drop_longer_than must be at least 1"),
    ],
)
def test_invalid_settings_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        text_input("a", **fields).validate()
