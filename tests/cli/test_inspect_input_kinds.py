"""`pax inspect-input` on every kind of input, in a terminal and as JSON, and on recipes with errors."""

from __future__ import annotations

import io
import json
import os
import sys

import numpy as np
import pytest

from paxcli.cli.inspect_input import inspect_input
from paxcli.errors import ConfigError, DataError, MissingError
from tests.report.pages import Page
from tests.terminal import run_in_terminal

RECIPES = """
import dataclasses

import numpy as np
from pax_recipes.classification import vit_synthetic
from pax_recipes.sequence import sequence_synthetic
from pax_recipes.tiny import tiny, tiny_synthetic
from paxcli.config.recipe import recipe
from paxcli.inputs.multi_input import MultiInput
from paxcli.inputs.base_input import Prompts
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.inputs.text import TextInput
from paxcli.inputs.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer


@recipe()
def text():
    config = tiny()
    config.train_input = TextInput.config(files=["*.txt"])
    config.eval_inputs[0] = TextInput.config(files=["*.txt"], reset_for_eval=True, eval_loop_num_batches=None)
    config.task.train.global_batch_size = 2
    config.task.model.max_seq_len = 8
    config.decode_inputs = [
        Prompts.config(prompts=["def f"]),
        TextInput.config(name="stories", files=["*.txt"], reset_for_eval=True, eval_loop_num_batches=None),
    ]
    return config


@recipe()
def several():
    config = tiny_synthetic()
    walk, other = (SyntheticInput.config(batch_size=size, seq_len=8, vocab_size=259) for size in (8, 4))
    config.train_input = MultiInput.config(inputs={"walk": walk, "other": other})
    return config


@recipe()
def stdlib():
    return tiny()


@recipe()
def synthetic():
    return tiny_synthetic()


@recipe()
def images():
    return vit_synthetic()


@recipe()
def pairs():
    return sequence_synthetic()


@dataclasses.dataclass(kw_only=True)
class Wrong(SyntheticInput):
    fault: str = ""

    def get_next(self):
        if self.fault == "repeated":
            self.reset()
        batch = super().get_next()
        if self.fault == "weightless":
            batch.weights = np.zeros_like(batch.weights)
        if self.fault == "large ids":
            batch.ids = batch.ids + 1000
        if self.fault == "one host":
            self.infeed_host_index = 0
        return batch


@recipe()
def wrong():
    config = tiny_synthetic()
    config.train_input = Wrong.config()
    return config


@recipe()
def other_tokenizer():
    config = text()
    config.eval_inputs[0].tokenizer = HuggingFaceTokenizer.partial(path="tokenizer.json", eos_token="a")
    return config


@recipe()
def no_model():
    config = text()
    config.train_input.tokenizer = SentencePieceTokenizer.partial(path="a.txt")
    return config
"""
KINDS = {
    "stdlib": {"ids", "labels", "weights", "segment_ids", "segment_pos"},
    "text": {"ids", "labels", "weights", "segment_ids", "segment_pos"},
    "synthetic": {"ids", "labels", "weights", "segment_ids", "segment_pos"},
    "images": {"image", "labels", "weights"},
    "pairs": {"source_ids", "source_segment_ids", "ids", "labels", "weights"},
    "several": {"walk.ids", "other.ids", "walk.weights"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "kinds.py").write_text(RECIPES)
    for name, content in {"a": "ab", "b": "cdefgh" * 5, "c": "an\x1bd\n" * 9}.items():
        (tmp_path / f"{name}.txt").write_text(content)
    vocabulary = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def inspect(capsys):
    """The JSON report of `pax inspect-input`, in this process."""

    def run(name: str, split: str = "train", **options) -> dict:
        inspect_input(f"./kinds.py:{name}", split, as_json=True, **options)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_as_json_and_as_text(kind, inspect, capsys, folder):
    report = inspect(kind, num_batches=2, save=folder / "batch.npz")
    (found,) = report["inputs"]
    with np.load(folder / "batch.npz") as file:
        saved = dict(file)
    assert KINDS[kind] <= found["fields"].keys() == {*saved}
    for field, facts in found["fields"].items():
        assert (facts["shape"], facts["dtype"]) == ([*saved[field].shape], str(saved[field].dtype))
        assert facts["min"] <= saved[field].min() <= saved[field].max() <= facts["max"]
    assert found["rows_per_second"] > 0 and not found["warnings"]
    assert (found["tokens_per_second"] is None) == (kind == "images")
    assert found["weights"].keys() == {field for field in found["fields"] if field.endswith("weights")}
    inspect_input(f"./kinds.py:{kind}", num_batches=2)
    text = capsys.readouterr().out
    assert "\x1b" not in text and "speed: first batch in" in text
    assert all(f"  {field} " in text for field in KINDS[kind])
    if kind == "images":
        assert f"labels  {saved['labels'][0]}\n" in text
    if kind == "pairs":
        assert f"source_ids  {saved['source_ids'][0][0]} " in text
        assert found["padding_share"] == pytest.approx(1 - found["weights"]["weights"])


@pytest.mark.slow
def test_every_split(inspect):
    train, evaluation, decode = (inspect("text", split=split) for split in ("train", "eval", "decode"))
    assert "prompts" not in train and decode["prompts"] == [{"prompt": "def f", "ids": [2, *(b + 3 for b in b"def f")]}]
    assert decode["inputs"][0]["name"] == "stories"
    assert decode["inputs"][0]["rows"] == evaluation["inputs"][0]["rows"]
    assert evaluation["inputs"][0]["rows"][0][0]["ids"] == ["<bos>ab", "<bos>cdef"]


def test_a_terminal_gets_segments_in_colours(folder):
    """In a real one."""
    command = [sys.executable, "-m", "paxcli", "inspect-input", "./kinds.py:text", "--split=eval"]
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    done = run_in_terminal(command, env)
    assert done.returncode == 0, done.stderr
    assert "\x1b[33m<bos>ab\x1b[0m│\x1b[36m<bos>cdef\x1b[0m" in done.stdout
    assert "\x1bd" not in done.stdout  # what the text itself would have a terminal do


CHATS = """{"messages": [{"role": "user", "content": "Say <b>hi</b>."}, {"role": "assistant", "content": "Hi,\\nyou."}]}
{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
"""
CHAT_INPUT = ["train_input=ChatInput", "train_input.files=[chats.jsonl]", "global_batch_size=1"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_tokens_without_loss_are_gray_in_a_terminal(folder, monkeypatch):
    (folder / "chats.jsonl").write_text(CHATS)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    inspect_input("tiny", num_batches=1, sets=CHAT_INPUT)
    gray, first, second, end = "\x1b[90m", "\x1b[33m", "\x1b[36m", "\x1b[0m"
    (row,) = (line.strip() for line in terminal.getvalue().splitlines() if "<bos>" in line)
    assert row.split("│") == [
        f"{gray}<bos><|user|>\\nSay <b>hi</b>.\\n<|assistant|>\\n{first}⟦Hi,\\nyou.<eos>⟧{gray}\\n{end}",
        f"{gray}<bos><|user|>\\n2 + 2?\\n<|assistant|>\\n{second}⟦4<eos>⟧{gray}\\n{end}",
        f"{gray}<pad>×175{end}",
    ]


def test_a_page_holds_all_rows_and_needs_no_other_file(folder, capsys):
    (folder / "chats.jsonl").write_text(CHATS)
    inspect_input("tiny", num_batches=2, sets=CHAT_INPUT, html=str(folder / "pages" / "batches.html"), as_json=True)
    report = json.loads(capsys.readouterr().out)
    text = (folder / "pages" / "batches.html").read_text()
    page = Page(text)
    assert report["html"] == str(folder / "pages" / "batches.html")
    assert page.links == [] and "script" not in page.tags and "b" not in page.tags
    (found,) = report["inputs"]
    shown = "".join("".join(page.texts).split())
    for row in (row for rows in found["rows"] for row in rows):
        assert "".join("│".join(row["ids"]).split()) in shown
    assert page.texts.count("⟦4<eos>⟧") == 2
    assert text.count('class="bar"') == sum(one["segments"] > 0 for one in found["lengths"]) == 2


def test_a_page_that_cannot_be_written_is_an_error(folder):
    with pytest.raises(MissingError, match=r"Cannot write .*a.txt/b.html"):
        inspect_input("tiny", num_batches=1, html=str(folder / "a.txt" / "b.html"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("repeated", "1 of 2 batches repeat another one"),
        ("weightless", "In 2 of 2 batches all weights are zero"),
        ("large ids", "but the model's vocab_size is 259"),
    ],
)
def test_each_fault_is_a_warning(inspect, fault, message):
    (found,) = inspect("wrong", sets=[f"train_input.fault={fault}"])["inputs"]
    assert any(message in warning for warning in found["warnings"]), found["warnings"]


def test_rows_shared_by_hosts_are_a_warning(inspect, capsys):
    apart, together = (
        inspect("wrong", hosts=4, host_index=1, sets=sets)["inputs"][0] for sets in ([], ["train_input.fault=one host"])
    )
    assert (apart["shared_rows"], apart["warnings"]) == (0, [])
    assert together["shared_rows"] > 0 and "more than one of 4 hosts" in together["warnings"][0]
    inspect_input("./kinds.py:wrong", hosts=2)
    assert "hosts: no rows are on more than one of 2" in capsys.readouterr().out


def test_another_tokenizer_is_a_warning(inspect):
    (found,) = inspect("other_tokenizer", split="eval")["inputs"]
    assert any("not the training input's" in warning for warning in found["warnings"])


@pytest.mark.parametrize(
    ("name", "sets", "error", "message"),
    [
        ("text", ["train_input.files=[nowhere/*.txt]"], DataError, "No file matches nowhere"),
        ("text", ["train_input.files=[]"], ConfigError, "files is"),
        ("no_model", [], DataError, "a.txt is not a SentencePiece model"),
        ("text", ["task.model.vocab_size=100"], ConfigError, "259 ids, but the model's vocab_size is 100"),
    ],
)
def test_faults_that_are_errors(inspect, name, sets, error, message):
    with pytest.raises(error, match=message):
        inspect(name, sets=sets)


@pytest.mark.parametrize("split", ["train", "eval", "decode"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reset_for_eval": "true", "eval_loop_num_batches": "null", "repeat": "true"}, "reset_for_eval=True needs"),
        ({"reset_for_eval": "false", "eval_loop_num_batches": "null"}, "nothing restarts"),
        ({"reset_for_eval": "true", "eval_loop_num_batches": "2"}, "full epochs"),
    ],
)
def test_impossible_epochs_are_errors_in_every_split(inspect, split, fields, message):
    source = {"train": "train_input", "eval": "eval_inputs.0", "decode": "decode_inputs.1"}[split]
    with pytest.raises(ConfigError, match=message):
        inspect("text", split=split, sets=[f"{source}.{field}={value}" for field, value in fields.items()])
