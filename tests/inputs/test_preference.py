"""Preference pairs: the tokens of both sides, and records without one of them."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from paxcli.errors import ConfigError, DataError
from paxcli.inputs.chat import ChatInput
from paxcli.inputs.mixture import MixtureInput
from paxcli.inputs.preference import PreferenceInput

EPOCH = {"reset_for_eval": True, "eval_loop_num_batches": None, "seq_len": 64}
PAIRS = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": f"It is {i}."} for i in range(3)]


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def as_messages(pair: dict[str, str], with_prompt: bool) -> dict:
    start = [say("user", pair["prompt"])]
    sides = {side: [say("assistant", pair[side])] for side in ("chosen", "rejected")}
    return {"prompt": start, **sides} if with_prompt else {side: start + turn for side, turn in sides.items()}


def write(path: pathlib.Path, records: list) -> list[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(path)]


@pytest.mark.parametrize("kind", ["text", "messages", "conversations", "both", "parquet"])
def test_both_sides_are_what_a_chat_input_reads(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), tmp_path / "a.parquet")
        files = [str(tmp_path / "a.parquet")]
    else:
        records = PAIRS if kind == "text" else [as_messages(pair, kind == "messages") for pair in PAIRS]
        if kind == "both":  # the layout of ultrafeedback_binarized
            records = [record | {"prompt": pair["prompt"]} for record, pair in zip(records, PAIRS, strict=True)]
        files = write(tmp_path / "a.jsonl", records)
    data = PreferenceInput(files=files, batch_size=4, **EPOCH)
    batch = data.get_next()
    for side, found in (("chosen", batch), ("rejected", batch.rejected)):
        chats = [{"messages": as_messages(pair, False)[side]} for pair in PAIRS]
        single = ChatInput(files=write(tmp_path / "b.jsonl", chats), batch_size=4, packing="one_per_row", **EPOCH)
        expected = single.get_next()
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x, err_msg=f"{side} {name}")
    assert not batch.weights[3].any()  # padding
    spec = data.element_spec()
    assert spec.rejected.ids.shape == spec.ids.shape == (4, 64)


@pytest.mark.parametrize("kind", ["text", "messages", "conversations"])
def test_a_system_prompt_begins_both_sides(kind: str, tmp_path: pathlib.Path) -> None:
    records = PAIRS if kind == "text" else [as_messages(pair, kind == "messages") for pair in PAIRS]
    records = [record | {"system": "S."} for record in records]
    batch = PreferenceInput(files=write(tmp_path / "a.jsonl", records), batch_size=3, **EPOCH).get_next()
    for side, found in (("chosen", batch), ("rejected", batch.rejected)):
        chats = [{"messages": [say("system", "S."), *as_messages(pair, False)[side]]} for pair in PAIRS]
        chat = ChatInput(files=write(tmp_path / "b.jsonl", chats), batch_size=3, packing="one_per_row", **EPOCH)
        np.testing.assert_array_equal(found.ids, chat.get_next().ids, err_msg=side)


def test_pairs_of_several_files_are_mixed(tmp_path: pathlib.Path) -> None:
    """An epoch of the mixture is that of each input in turn, both sides of each pair in one row."""
    files = [write(tmp_path / "a.jsonl", PAIRS[:1]), write(tmp_path / "b.jsonl", PAIRS[1:])]
    mixture = MixtureInput(
        inputs=[PreferenceInput(files=one) for one in files], weights=[1.0, 2.0], batch_size=3, **EPOCH
    )
    mixture.check_data()
    batch, expected = mixture.get_next(), PreferenceInput(files=sum(files, []), batch_size=3, **EPOCH).get_next()
    order = [np.flatnonzero((expected.ids == row).all(axis=1))[0] for row in batch.ids]
    assert sorted(order) == [0, 1, 2]
    for name in ("ids", "labels", "weights"):
        np.testing.assert_array_equal(batch[name], expected[name][order])
        np.testing.assert_array_equal(batch.rejected[name], expected.rejected[name][order])
    with pytest.raises(ConfigError, match="batches of its inputs differ"):
        chat = ChatInput(files=files[0], packing="one_per_row")
        MixtureInput(
            inputs=[PreferenceInput(files=files[0]), chat], weights=[1.0, 1.0], batch_size=1, **EPOCH
        ).validate()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"a\.jsonl, line 2 has no `rejected`; fields: prompt, chosen"),
        ({"prompt": "a", "rejected": "b"}, r"a\.jsonl, line 2 has no `chosen`"),
        (
            {"prompt": "a", "chosen": 3, "rejected": "b"},
            r"a\.jsonl, line 2, message 1 has `content` of type int, not text",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": 3},
            r"a\.jsonl, line 2, message 1 has `content` of type int, not text",
        ),
        ({"chosen": [say("user", "a")], "rejected": "b"}, r"a\.jsonl, line 2 has no assistant message"),
        (
            {"question": "a", "chosen": "b", "rejected": "c"},
            r"line 2 has no `prompt`, and `chosen` is a text; fields: q",
        ),
    ],
)
def test_a_record_that_is_not_a_pair_is_named(record: dict, message: str, tmp_path: pathlib.Path) -> None:
    data = PreferenceInput(files=write(tmp_path / "a.jsonl", [PAIRS[0], record]), batch_size=1, **EPOCH)
    with pytest.raises(DataError, match=message) as caught:
        data.check_data()
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_is_left_out_if_one_side_is(side: str, num_workers: int, tmp_path: pathlib.Path, caplog) -> None:
    other = {"chosen": "rejected", "rejected": "chosen"}[side]
    system = [say("system", "long " * 20), say("user", "1?")]  # no token of the answer is in the row
    too_long = {side: [*system, say("assistant", "2")], other: as_messages(PAIRS[0], False)[other]}
    bad = {**PAIRS[0], side: ""}
    records = [PAIRS[0], bad, too_long, PAIRS[1], {**PAIRS[0], side: "wordy " * 8}, PAIRS[2]]
    split = [write(tmp_path / f"{i}.jsonl", part) for i, part in enumerate((records[:2], records[2:]))]
    options = {"on_bad_record": "skip", "drop_longer_than": 55, "num_workers": num_workers}
    found = PreferenceInput(files=sum(split, []), batch_size=4, **options, **EPOCH).get_next()
    expected = PreferenceInput(files=write(tmp_path / "good.jsonl", PAIRS), batch_size=4, **EPOCH).get_next()
    for name in ("ids", "labels", "weights"):
        np.testing.assert_array_equal(found[name], expected[name])
        np.testing.assert_array_equal(found.rejected[name], expected.rejected[name])
    assert "skipped 1 bad records" in caplog.text and "dropped 2 documents" in caplog.text


def test_packing_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="packing=first_fit would separate pairs"):
        PreferenceInput(files=["a.jsonl"], batch_size=1, packing="first_fit", **EPOCH).validate()


@pytest.mark.parametrize(
    "prompt",
    [
        "Q2?",
        "Q2?\n",
        [say("user", "Q2?") | {"name": None}],
        [{"from": "user", "value": "Q2?"}],
        [{"from": "human", "value": "Q2?"}],
        "",
    ],
)
def test_a_prompt_that_the_conversations_contain_is_read_once(prompt: object, tmp_path: pathlib.Path) -> None:
    start = [say("system", "S."), say("user", "Q1?"), say("assistant", "A1."), say("user", "Q2?")]
    record = {side: [*start, say("assistant", f"{side}.")] for side in ("chosen", "rejected")}
    files = [write(tmp_path / f"{i}.jsonl", [each]) for i, each in enumerate((record, record | {"prompt": prompt}))]
    plain, prompted = (PreferenceInput(files=each, batch_size=1, **EPOCH).get_next() for each in files)
    np.testing.assert_array_equal(prompted.ids, plain.ids)
    np.testing.assert_array_equal(prompted.rejected.ids, plain.rejected.ids)


def test_the_conversations_may_be_of_sharegpt(tmp_path: pathlib.Path) -> None:
    turns = {side: [say("user", "Q?"), say("assistant", f"{side}.")] for side in ("chosen", "rejected")}
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = {
        side: [{"from": names[x["role"]], "value": x["content"]} for x in found] for side, found in turns.items()
    }
    files = [write(tmp_path / f"{i}.jsonl", [each | {"prompt": "Q?"}]) for i, each in enumerate((turns, sharegpt))]
    plain, other = (PreferenceInput(files=each, batch_size=1, **EPOCH).get_next() for each in files)
    np.testing.assert_array_equal(other.ids, plain.ids)


def test_a_prompt_that_the_conversations_lack_is_an_error(tmp_path: pathlib.Path) -> None:
    record = {side: [say("user", "Q?"), say("assistant", f"{side}.")] for side in ("chosen", "rejected")}
    files = write(tmp_path / "a.jsonl", [record | {"prompt": "Another question?"}])
    with pytest.raises(DataError, match="`chosen` begins with messages of the user, and lacks those of `prompt`"):
        PreferenceInput(files=files, batch_size=1, **EPOCH).get_next()
