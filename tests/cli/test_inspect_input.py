from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

RECIPE = """
from pax_recipes.tiny import tiny
from paxcli.config.recipe import recipe
from paxcli.inputs.base_input import Prompts
from paxcli.inputs.text import TextInput
from paxcli.inputs.tokenizers import SentencePieceTokenizer


@recipe()
def mine():
    config = tiny()
    config.decode_inputs = [Prompts.config(prompts=["def f", "a\\nb"])]
    return config


@recipe()
def differs():
    config = mine()
    config.eval_inputs[0].tokenizer = SentencePieceTokenizer.partial(path="missing.model")
    return config


@recipe()
def missing():
    config = mine()
    config.train_input = TextInput.config(files=["nowhere/*.txt"])
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    return "./mine.py:mine"


def as_json(result: subprocess.CompletedProcess) -> dict:
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def _arrays_in(path):
    with np.load(path) as file:
        return dict(file)


def test_json_describes_the_saved_batches(pax_here, tmp_path):
    report = as_json(pax_here("inspect-input", "tiny", "--num-batches", "3", "--save", "batch.npz", "--json"))
    (train,) = report["inputs"]
    saved = _arrays_in(tmp_path / "batch.npz")
    assert report["saved"] == "batch.npz"
    assert set(saved) == set(train["fields"]) == {"ids", "labels", "weights", "segment_ids", "segment_pos"}
    for field, facts in train["fields"].items():
        assert (facts["shape"], facts["dtype"]) == ([*saved[field].shape], str(saved[field].dtype))
        assert facts["min"] <= saved[field].min() <= saved[field].max() <= facts["max"]
    text = "".join(train["rows"][0][0]["ids"]).removeprefix("<bos>")
    assert bytes(i - 3 for i in saved["ids"][0] if i > 2).decode(errors="replace") == text.replace("<bos>", "")
    assert [len(rows) for rows in train["rows"]] == [8, 8, 8]
    assert train["padding_share"] == 0
    assert train["warnings"] == []


def test_a_batch_is_sharded_over_hosts(pax_here, tmp_path):
    pax_here("inspect-input", "tiny", "--save", "all.npz")
    for host in range(2):
        report = as_json(
            pax_here(
                "inspect-input", "tiny", "--hosts", "2", "--host-index", str(host), "--save", f"{host}.npz", "--json"
            )
        )
        assert report["inputs"][0]["warnings"] == []
    *parts, together = (_arrays_in(tmp_path / f"{name}.npz")["ids"] for name in (0, 1, "all"))
    np.testing.assert_array_equal(np.concatenate(parts), together)


def test_text_has_one_line_per_row_and_no_control_codes(pax_here):
    result = pax_here("inspect-input", "tiny", "--split", "eval", "--num-batches", "40")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "│<bos>" in result.stdout
    assert "stdlib: 40 batches" in result.stdout
    assert result.stdout.count("… 4 more rows") == 40


def test_prompts_are_shown_as_ids(pax_here, recipe):
    report = as_json(pax_here("inspect-input", recipe, "--split", "decode", "--json"))
    assert report["prompts"][0] == {"prompt": "def f", "ids": [2, *(byte + 3 for byte in b"def f")]}
    assert "4 ids  a\\nb" in pax_here("inspect-input", recipe, "--split", "decode").stdout


@pytest.mark.parametrize(
    ("name", "args", "exit_code", "message"),
    [
        ("mine", ["--hosts", "2", "--host-index", "2"], 2, "no host 2 of 2"),
        ("mine", ["--hosts", "3"], 2, "8 does not divide over 3 hosts"),
        ("mine", ["--split", "decode", "--hosts", "2"], 2, "Every host decodes all"),
        ("mine", ["--split", "decode", "--save", "x.npz"], 2, "prompts, not batches"),
        ("mine", ["--save", "no/where.npz"], 3, "Cannot write no/where.npz"),
        ("mine", ["--set", "task.model.vocab_size=100"], 2, "259 ids, but the model's vocab_size is 100"),
        ("missing", [], 5, "No file matches nowhere"),
        ("differs", ["--split", "eval"], 5, "no tokenizer file missing.model"),
    ],
)
def test_mistakes_are_named(pax_here, recipe, name, args, exit_code, message):
    result = pax_here(
        "inspect-input", recipe.replace("mine", name).replace(f"./{name}.py", "./mine.py"), *args, "--json"
    )
    error = json.loads(result.stdout)["error"]
    assert (result.returncode, error["exit_code"]) == (exit_code, exit_code)
    assert message in error["message"]
    assert "Traceback" not in result.stderr


def test_starts_no_device():
    code = """
from paxcli.cli.inspect_input import inspect_input
inspect_input("tiny", as_json=True)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
