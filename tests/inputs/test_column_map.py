"""Columns with names of no layout give what the same rows give under the names of the layout."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError, DataError
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.preference import PreferenceInput
from tests.inputs.formats import write_array_record

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "seq_len": 64, "batch_size": 4}
ROWS = [{"prompt": f"{i} + 1?", "completion": f"It is {i + 1}."} for i in range(4)]
PAIRS = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": f"It is {i}."} for i in range(4)]
GSM8K = {"prompt": "question", "completion": "answer"}
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "arrayrecord")


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> str:
    kind = path.suffix[1:]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrayrecord":
        write_array_record(path, [json.dumps(row).encode() for row in rows])
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rename(rows: list[dict[str, Any]], names: dict[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{names.get(name, name): value for name, value in row.items()} | more for row in rows]


def assert_same(one: ChatInput, other: ChatInput) -> None:
    found, expected = one.get_next(), other.get_next()
    assert expected.weights.any()
    for name in ("ids", "labels", "weights", "segment_ids"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        if "rejected" in expected:
            np.testing.assert_array_equal(found.rejected[name], expected.rejected[name], err_msg=name)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("source", "rows", "names"),
    [(ChatInput, ROWS, GSM8K), (PreferenceInput, PAIRS, {"prompt": "question", "chosen": "good", "rejected": "bad"})],
)
def test_columns_of_any_name(kind: str, source: Any, rows: Any, names: Any, tmp_path: pathlib.Path) -> None:
    files = [write(tmp_path / f"a.{kind}", rename(rows, names))]
    expected = source(files=[write(tmp_path / "b.jsonl", rows)], **EPOCH)
    assert_same(source(files=files, column_map=names, **EPOCH), expected)
    with pytest.raises(DataError, match=", ".join(names.values())) as caught:
        source(files=files, **EPOCH).check_data()
    assert "column_map" in caught.value.hint


def test_names_that_are_each_others(tmp_path: pathlib.Path) -> None:
    names = {"chosen": "rejected", "rejected": "chosen"}
    files = [write(tmp_path / "a.jsonl", rename(PAIRS, names))]
    expected = PreferenceInput(files=[write(tmp_path / "b.jsonl", PAIRS)], **EPOCH)
    assert_same(PreferenceInput(files=files, column_map=names, **EPOCH), expected)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_the_named_columns_are_read(kind: str, tmp_path: pathlib.Path) -> None:
    """The rows also have a complete conversation in other layouts; `system` and `tools` keep their names."""
    others = {"prompt": "no", "response": "no", "instruction": "no", "input": "no", "output": "no", "system": "S."}
    others |= {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "no"}]}
    files = [write(tmp_path / f"a.{kind}", rename(ROWS, GSM8K, **others))]
    expected = ChatInput(files=[write(tmp_path / "b.jsonl", rename(ROWS, {}, system="S."))], **EPOCH)
    assert_same(ChatInput(files=files, column_map=GSM8K, **EPOCH), expected)
    swapped = {"prompt": "completion", "completion": "prompt"}
    files = [write(tmp_path / f"c.{kind}", rename(ROWS, swapped))]
    expected = ChatInput(files=[write(tmp_path / "d.jsonl", ROWS)], **EPOCH)
    assert_same(ChatInput(files=files, column_map=swapped, **EPOCH), expected)


def test_one_name_of_two(tmp_path: pathlib.Path) -> None:
    """The other one has its name in a layout, here Alpaca's, with the input after the instruction."""
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}]
    expected = ChatInput(files=[write(tmp_path / "a.jsonl", rows)], **EPOCH)
    files = [write(tmp_path / "b.jsonl", rename(rows, {"output": "answer"}))]
    assert_same(ChatInput(files=files, column_map={"completion": "answer"}, **EPOCH), expected)
    files = [write(tmp_path / "c.jsonl", rename(ROWS, {"prompt": "question", "completion": "response"}))]
    expected = ChatInput(files=[write(tmp_path / "d.jsonl", ROWS)], **EPOCH)
    assert_same(ChatInput(files=files, column_map={"prompt": "question"}, **EPOCH), expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("rows", "source"),
    [(rename(ROWS, GSM8K), ChatInput), (rename(PAIRS, {"chosen": "answer", "prompt": "question"}), PreferenceInput)],
)
def test_a_missing_column_is_named_with_those_that_there_are(
    kind: str, rows: list[dict[str, Any]], source: type[ChatInput], tmp_path: pathlib.Path
) -> None:
    name = "completion" if source is ChatInput else "chosen"
    files = [write(tmp_path / f"a.{kind}", rows)]
    data = source(files=files, column_map={"prompt": "question", name: "reply"}, **EPOCH)  # pyrefly: ignore
    has = ", ".join(rows[0])
    with pytest.raises(DataError, match=f"a.{kind}.*(has no|`question` and) (column )?`reply`; (it has|fields:) {has}"):
        data.check_data()


def test_a_record_without_a_column_can_be_skipped(tmp_path: pathlib.Path) -> None:
    rows = rename(ROWS, GSM8K)
    rows[1:1] = [{"question": "?"}, {"question": "?", "answer": None}]
    files = [write(tmp_path / "a.jsonl", rows)]
    data = ChatInput(files=files, column_map=GSM8K, on_bad_record="skip", bad_record_budget=2, **EPOCH)
    assert_same(data, ChatInput(files=[write(tmp_path / "b.jsonl", ROWS)], **EPOCH))
    found = "line 2 does not have `question` and `answer`; fields: question."
    assert [record.endswith(found) for record in data.corpus.bad_records] == [True, False]


def test_fields_that_exclude_each_other_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="text_field is chat, column_map is {'prompt': 'question'}"):
        ChatInput(files=["a.jsonl"], text_field="chat", column_map={"prompt": "question"}, **EPOCH).validate()


def test_it_is_set_by_name(tmp_path: pathlib.Path) -> None:
    sets = ["train_input=ChatInput", "train_input.column_map={prompt: question, completion: answer}"]
    assert resolve("tiny", [], sets).config.train_input.column_map == GSM8K
    sets = ["train_input=ChatInput", "column_map.prompt=question", "column_map.completion=answer"]
    assert resolve("tiny", [], sets).config.train_input.column_map == GSM8K
    with pytest.raises(ConfigError, match="expected one of prompt, completion"):
        resolve("tiny", [], ["train_input=ChatInput", "train_input.column_map={question: prompt}"])
