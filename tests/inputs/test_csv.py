"""CSV and TSV files give what JSON lines with the same rows give, and bad rows and files are named."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import pathlib
from typing import Any

import jax
import numpy as np
import pyarrow
import pyarrow.csv
import pytest
from backports import zstd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paxcli.cli.main import app
from paxcli.errors import DataError
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.preference import PreferenceInput
from paxcli.inputs.text import TextInput

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "batch_size": 2, "seq_len": 16}
TEXTS = ["first", 'a, "quoted"\r\ncell', "naïve ☃\n\n\ttab", "", "last\r", " spaces ", "=1", "'", '"']
CELLS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",\t\r\n\x00'), max_size=12)


def write(path: pathlib.Path, rows: list[dict[str, Any]], **options: Any) -> str:
    """Writes rows with Python's csv, or as JSON lines."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        dialect = "excel-tab" if path.suffix == ".tsv" else "excel"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), dialect=dialect, **options)
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def text_input(*files: object, **fields: Any) -> TextInput:
    return TextInput(files=[str(file) for file in files], **{**EPOCH, **fields})


def assert_same(found: TextInput, expected: TextInput) -> None:
    for one, other in zip(found.eval_batches(), expected.eval_batches(), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert found.data_fingerprint() == expected.data_fingerprint()


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "tsv.xz", "csv.zst"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_is_a_document(suffix: str, num_workers: int, tmp_path: pathlib.Path) -> None:
    rows = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstd.compress}.get(suffix.rpartition(".")[2], bytes)
    plain = pathlib.Path(write(tmp_path / f"plain.{suffix[:3]}", rows))
    (tmp_path / f"a.{suffix}").write_bytes(pack(plain.read_bytes()))
    lines = text_input(write(tmp_path / "a.jsonl", rows), packing="first_fit")
    assert_same(text_input(tmp_path / f"a.{suffix}", packing="first_fit", num_workers=num_workers), lines)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4),
    st.sampled_from(["csv", "tsv"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
)
def test_any_text_is_read_as_from_json_lines(
    tmp_path: pathlib.Path, cells: list[tuple[str, str]], suffix: str, end: str, quoting: int
) -> None:
    rows = [{"other, name": other, "text": text} for other, text in [*cells, ("", "an end")]]
    found = text_input(write(tmp_path / f"a.{suffix}", rows, quoting=quoting, lineterminator=end))
    assert_same(found, text_input(write(tmp_path / "a.jsonl", rows)))


def test_other_writers_and_layouts(tmp_path: pathlib.Path) -> None:
    """A file of Arrow, which quotes all texts; a byte order mark; blank lines; other ends of lines."""
    rows = [{"text": text, "n": "1"} for text in TEXTS]
    expected = text_input(write(tmp_path / "a.jsonl", rows))
    pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), tmp_path / "arrow.csv")
    assert_same(text_input(tmp_path / "arrow.csv"), expected)
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "arrow.csv").read_bytes())
    assert_same(text_input(tmp_path / "marked.csv"), expected)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    expected = text_input(tmp_path / "b.jsonl")
    for content in ("\n\nn,text\n\n1,a\n\n2,b\n\n", "text,n\ra,1\rb,2\r", "text\na\nb", '"text"\r\n"a"\r\n"b"\r\n'):
        (tmp_path / "b.txt").write_bytes(content.encode())
        assert_same(text_input(tmp_path / "b.txt", format="csv"), expected)


def test_a_run_resumes_at_a_position_of_either_format(tmp_path: pathlib.Path) -> None:
    rows = [{"text": f"text {number}, of several"} for number in range(20)]
    fields = {"is_training": True, "reset_for_eval": False, "eval_loop_num_batches": 1, "input_random_seed": 3}
    lines = text_input(write(tmp_path / "a.jsonl", rows), **fields)
    for _ in range(5):
        lines.get_next()
    resumed = text_input(write(tmp_path / "a.csv", rows), **fields)
    resumed.set_state(lines.get_state())
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, resumed.get_next(), lines.get_next())


CHATS = [
    {"instruction": "Add, please.", "input": "", "output": "3", "prompt": None, "system": None, "tools": None},
    {"instruction": "Add.", "input": "1,\n2", "output": '"3"', "prompt": None, "system": "Be brief.", "tools": None},
    {"instruction": None, "input": None, "output": "Hello", "prompt": "Hi", "system": None, "tools": "[]"},
]
PAIRS = [
    {"prompt": "1 + 1?", "chosen": "2", "rejected": "It is\n3, or so.", "system": None},
    {"prompt": "2 + 1?", "chosen": '"3"', "rejected": "4", "system": "Be brief."},
]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize(("kind", "rows"), [(ChatInput, CHATS), (PreferenceInput, PAIRS)])
def test_chats_and_pairs(kind: type[ChatInput], rows: list[dict], suffix: str, tmp_path: pathlib.Path) -> None:
    """An empty cell, which is how None is written, is a missing field."""
    found, expected = (
        kind(files=[write(tmp_path / f"a.{each}", rows)], **{**EPOCH, "seq_len": 128}) for each in (suffix, "jsonl")
    )
    assert_same(found, expected)
    assert not found.corpus.bad_records


def test_bad_rows_are_named_and_skipped(tmp_path: pathlib.Path) -> None:
    rows = [b'text,n\n"two\nlines",1\n', b"few\n", b"a,b,c\n", b"\n", b'"caf\xe9\n",1\n', b"good,2\n", b"cut \xc3,1"]
    (tmp_path / "a.csv").write_bytes(b"".join(rows))
    with pytest.raises(DataError, match=r"a.csv, line 4 has 1 cells, and the first row has 2"):
        text_input(tmp_path / "a.csv").check_data()
    data = text_input(tmp_path / "a.csv", on_bad_record="skip", bad_record_budget=4)
    (tmp_path / "a.jsonl").write_text('{"text": "two\\nlines"}\n{"text": "good"}\n')
    assert_same(data, text_input(tmp_path / "a.jsonl"))
    places = [record.rpartition("a.csv, ")[2].rstrip(".") for record in data.corpus.bad_records]
    assert places == [
        "line 4 has 1 cells, and the first row has 2",
        "line 5 has 3 cells, and the first row has 2",
        "line 7 is not UTF-8 text after 'caf'",
        "line 10 is not UTF-8 text after 'cut '",
    ]
    with pytest.raises(DataError, match="More than 3 records cannot be read. The last one: .*line 10"):
        text_input(tmp_path / "a.csv", on_bad_record="skip", bad_record_budget=3).check_data()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("txt,n\na,1\n", r"a.csv has no column `text`; it has txt, n"),
        ("text,n,text\na,1,b\n", "line 1: columns do not have a name each, or share one: text, n, text"),
        (",text\n0,a\n", "line 1: columns do not have a name each"),
        ("text\na\n".encode("utf-16"), "line 1 is not UTF-8 text"),
        ('text,n\na,1\n"b,2\nc,3\n', "line 3 cannot be split into cells: unexpected end of data"),
        ('text,n\n"a" b,1\n', "line 2 cannot be split into cells"),
        ("text\n", "all files are empty"),
        ("", "all files are empty"),
    ],
)
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_files_that_cannot_be_read(content: str | bytes, message: str, policy: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        text_input(tmp_path / "a.csv", on_bad_record=policy).check_data()


@pytest.mark.parametrize("kind", [ChatInput, PreferenceInput])
def test_chats_without_their_columns(kind: type[ChatInput], tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.csv", [{"question": "a", "answer": "b"}])
    with pytest.raises(
        DataError, match="a.csv has no column `(messages|chosen)`, nor `prompt`; it has question, answer"
    ) as caught:
        kind(files=[path], **EPOCH).check_data()
    assert "column_map" in caught.value.hint


def test_truncated_compression(tmp_path: pathlib.Path) -> None:
    content = gzip.compress(b"text\n" + b"".join(b"%d\n" % (number**5) for number in range(10_000)))
    (tmp_path / "a.csv.gz").write_bytes(content[:-20])
    for policy in ("error", "skip"):
        with pytest.raises(DataError, match=r"a.csv.gz is truncated: its compressed data ends after line \d+"):
            text_input(tmp_path / "a.csv.gz", on_bad_record=policy).check_data()


@pytest.mark.parametrize("suffix", ["csv", "tsv.gz"])
def test_token_files_of_rows(suffix: str, tmp_path: pathlib.Path) -> None:
    rows = [{"body": text, "n": "1"} for text in TEXTS]
    plain = pathlib.Path(write(tmp_path / f"a.{suffix[:3]}", rows))
    if suffix != "csv":
        (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(plain.read_bytes()))
    lines = text_input(write(tmp_path / "a.jsonl", rows), text_field="body")
    command = [
        "data",
        "tokenize",
        str(tmp_path / f"a.{suffix}"),
        "--out",
        str(tmp_path / "out"),
        "--text-field",
        "body",
    ]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["documents"] == len(list(filter(None, TEXTS)))
    for found, expected in zip(
        text_input(tmp_path / "out" / "*.bin").eval_batches(), lines.eval_batches(), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_files_are_split_as_those_of_other_formats(tmp_path: pathlib.Path) -> None:
    for number in range(12):
        write(tmp_path / f"{number}.csv", [{"text": f"text {number}"}])
    parts = [
        text_input(tmp_path / "*.csv", split=split, eval_fraction=0.3).corpus.packs[0].num_documents
        for split in ("train", "eval")
    ]
    assert sum(parts) == 12 and all(parts)
