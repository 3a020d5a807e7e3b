"""Unusable weights, conversations, templates and adapters: one screen, and the exit code of what is at fault."""

from __future__ import annotations

import json
import pathlib
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paxcli.cli.main import app
from paxcli.cli.output import run
from tests.convert.huggingface.directories import write_directory

CONFIGURATION, DATA = 2, 5


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)


def cut_short(weights: pathlib.Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-100])


def lie(weights: pathlib.Path) -> None:
    content = weights.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["lm_head.weight"]["shape"] = [7, 7]
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def reshape(weights: pathlib.Path) -> None:
    save_file(load_file(weights) | {"lm_head.weight": np.zeros((60, 32), np.float32)}, weights)


def replace_by_pickle(weights: pathlib.Path) -> None:
    weights.rename(weights.with_name("pytorch_model.bin"))


def change_family(weights: pathlib.Path) -> None:
    config = weights.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "lamma", "architectures": ["Lamma"]}))


def error_of(capsys, words: list[str], code: int) -> str:
    assert run(app, words) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and len(shown.splitlines()) <= 20, shown
    return " ".join(shown.split())


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (cut_short, DATA, "model.safetensors is damaged or incomplete"),
        (lie, DATA, "model.safetensors is damaged or incomplete"),
        (reshape, DATA, "`lm_head.weight`"),
        (replace_by_pickle, DATA, "AutoModelForCausalLM.from_pretrained("),
        (change_family, CONFIGURATION, "Pax cannot import Lamma"),
    ],
)
def test_bad_weights(capsys, tmp_path: pathlib.Path, damage, code: int, message: str) -> None:
    source = write_directory(tmp_path / "hf", "llama2")
    damage(source / "model.safetensors")
    assert message in error_of(capsys, ["import", str(source), "--out", "run"], code)
    assert not pathlib.Path("run/checkpoints").exists()


def test_a_dry_run_lists_every_difference(capsys, tmp_path: pathlib.Path) -> None:
    source = write_directory(tmp_path / "hf", "llama2")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    more = {"lm_head.weight": np.zeros((60, 32), np.float32), "lm_head.bias": np.zeros(60, np.float32)}
    save_file(tensors | more, source / "model.safetensors")
    assert run(app, ["import", str(source), "--out", "run", "--dry-run"]) == 5
    assert capsys.readouterr().out.splitlines() == [
        "matched: 18",
        "missing: 2",
        "  model.norm.weight",
        "  model.layers.1.mlp.up_proj.weight",
        "unexpected: 1",
        "  lm_head.bias",
        "mismatched: 1",
        "  `lm_head.weight` is [60, 32] there, [61, 32] here",
    ]
    assert not pathlib.Path("run").exists()


def sft(*more: str) -> list[str]:
    sets = ["model.vocab_size=259", "train_input.files=[chats.jsonl]", "eval_inputs=[]", "num_layers=1", *more]
    words = ["inspect-input", "tiny-synthetic", "--overlay", "sft", "--num-batches", "1"]
    return words + [word for value in sets for word in ("--set", value)]


def write_chat(*roles: str) -> None:
    turns = [{"role": role, "content": "Hello"} for role in roles]
    pathlib.Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "fails: Roles must alternate"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    ],
    ids=["raises", "loops"],
)
def test_a_bad_template(capsys, template: str, message: str) -> None:
    write_chat("user", "assistant")
    pathlib.Path("chat.jinja").write_text(template)
    assert message in error_of(capsys, sft("train_input.chat_template=chat.jinja"), DATA)


def test_a_chat_without_an_assistant(capsys) -> None:
    write_chat("user", "user")
    assert "line 1 has no assistant message" in error_of(capsys, sft(), DATA)


def test_a_regex_of_adapters_that_matches_nothing(capsys) -> None:
    words = ["train", "tiny-synthetic", "--overlay", "lora", "--set", "lora.targets=q_proj", "--dry-run"]
    assert "q_proj" in error_of(capsys, words, CONFIGURATION)
