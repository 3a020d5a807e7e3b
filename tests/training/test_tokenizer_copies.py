"""A tokenizer file that is replaced, moved or damaged after a run has started."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest
import tokenizers

import paxcli as pax
from paxcli.errors import DataError
from paxcli.training.progress import Reporter

_WORDS = ["</s>", *"abcdefgh"]


def _write_tokenizer(path: pathlib.Path, words: list[str]) -> None:
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def _recipe(steps: int = 2) -> pax.Recipe:
    values: dict[str, Any] = {"num_layers": 1, "model_dims": 16, "hidden_dims": 32, "num_heads": 1, "max_seq_len": 16}
    values |= {"global_batch_size": 4, "num_train_steps": steps, "eval_inputs": ["ChatInput"]}
    values["train_input"] = "TextInput"
    for source, file in (("train_input", "text.jsonl"), ("eval_inputs.0", "chat.jsonl")):
        values |= {f"{source}.files": [file], f"{source}.tokenizer": "HuggingFaceTokenizer"}
        values |= {f"{source}.tokenizer.path": "t/tokenizer.json", f"{source}.tokenizer.eos_token": "</s>"}
    return pax.load("tiny", set=values)


def _train(steps: int) -> pax.Run:
    return pax.train(_recipe(steps), "run", progress=Reporter(), allow_changed=True)


def _outputs(run: pax.Run) -> Any:
    return run.evaluate(), [one.text for one in run.generate(["a b", "c"], 4, temperature=0)]


@pytest.fixture
def trained(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pax.Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    _write_tokenizer(tmp_path / "t" / "tokenizer.json", _WORDS)
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tmp_path / "t" / "chat_template.jinja").write_text(template)
    (tmp_path / "t" / "additional_chat_templates").mkdir()
    (tmp_path / "t" / "additional_chat_templates" / "tool_use.jinja").write_text(template)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join("abcdefgh" * 30)}))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a b", "response": " c d"}))
    return _train(2)


def test_a_run_keeps_its_tokenizer(trained, tmp_path, monkeypatch, caplog):
    expected = _outputs(trained)
    _write_tokenizer(tmp_path / "t" / "tokenizer.json", [*_WORDS[:1], *reversed(_WORDS[1:])])
    with pytest.raises(DataError, match="has changed since the run started"):
        pax.export_weights(trained, "out")
    with caplog.at_level(logging.WARNING):
        assert _outputs(pax.Run(tmp_path / "run")) == expected
    assert "tokenizer t/tokenizer.json has changed since the run started: using the run's copy" in caplog.text
    with pytest.raises(DataError, match=r"tokenizer t/tokenizer.json has changed since the run started") as caught:
        _train(3)
    [copy] = (tmp_path / "run" / "tokenizers").glob("*/tokenizer.json")
    assert (copy.parent / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert f"run/tokenizers/{copy.parent.name}/tokenizer.json" in str(caught.value.hint)

    (tmp_path / "t").rename(tmp_path / "elsewhere")
    assert pax.Run(tmp_path / "run").evaluate() == expected[0]
    for name in ("chat_template.jinja", "tokenizer.json"):
        copy.with_name(name).write_text(copy.read_text() + " ")
        with pytest.raises(DataError, match=r"The run's tokenizer .*/tokenizer.json is missing or damaged"):
            pax.Run(tmp_path / "run").evaluate()
        copy.with_name(name).unlink()


def test_a_resume_leaves_a_sound_copy_alone_and_completes_a_torn_one(trained, tmp_path):
    [copy] = (tmp_path / "run" / "tokenizers").glob("*/tokenizer.json")
    content, written = copy.read_bytes(), copy.stat().st_mtime_ns
    _train(3)
    assert copy.stat().st_mtime_ns == written
    copy.write_bytes(content[:100])  # as of a first start that was killed
    _train(4)
    assert copy.read_bytes() == content


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_record_of_copies_is_named(trained, tmp_path, text):
    (tmp_path / "run" / "tokenizers.json").write_text(text)
    with pytest.raises(DataError, match=r"tokenizers\.json is (not JSON|a JSON list)"):
        trained.generate(["a"], 1)
