"""From weights of Hugging Face to weights of Hugging Face: import, SFT with LoRA, eval, chat, export, the same text."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest
import yaml

from tests.convert.huggingface.directories import write_directory, write_tokenizer
from tests.house.test_docs import BLOCK, commands

PAGE = pathlib.Path(__file__).parents[2] / "docs/learn/llama-round-trip.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
OVERLAY = {
    "train_input.files": ["chats.jsonl"],
    "train_input.chat_template": TEMPLATE,
    "eval_inputs": [],
    "task.train.percore_batch_size": 8,
    "task.train.num_train_steps": 25,
    "task.train.learner.learning_rate": 0.02,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_is_imported_fine_tuned_and_exported(pax, tmp_path: pathlib.Path) -> None:
    write_tokenizer(write_directory(tmp_path / "hf", "llama2", bos_token_id=1, eos_token_id=2))
    rows = [{"prompt": f"what is {i}?", "response": f"it is {i}."} for i in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(*words: str) -> dict:
        done = pax(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def greedy(run_dir: str) -> list[int]:
        words = ["decode", run_dir, "--prompt", "user: what is 7?\n", "--temperature", "0", "--max-tokens", "8"]
        return run(*words)["outputs"][0]["ids"]

    run("import", "hf", "--out", "base")
    imported = yaml.safe_load((tmp_path / "base/recipe.yaml").read_text())["set"]
    tokenizer = {path: value for path, value in imported.items() if path.startswith("train_input.tokenizer")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tokenizer | OVERLAY))
    overlays = [word for name in ("sft", "lora", "mine.yaml") for word in ("--overlay", name)]
    train = ["train", "base/recipe.yaml", *overlays, "--from", "base", "--run-dir", "tuned"]
    assert run(*train)["steps"] == 25
    text = greedy("tuned")
    assert text != greedy("base")
    run("export", "tuned", "--out", "merged")
    run("import", "merged", "--out", "again")
    assert greedy("again") == text
    run("export", "tuned", "--out", "adapter", "--adapter")
    run("import", "hf", "--adapter", "adapter", "--out", "from_adapter")
    assert greedy("from_adapter") == text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("TORCH_PYTHON" not in os.environ, reason="needs TORCH_PYTHON, a Python with torch and transformers")
def test_the_page_ends_with_the_same_text_in_transformers(pax, tmp_path: pathlib.Path) -> None:
    for _, kind, title, text in BLOCK.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).write_text(text)
        if kind == "python":
            script = [os.environ["TORCH_PYTHON"], title]
            done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        for words in commands(text) if kind == "console" else ():
            done = pax(*words)
            assert done.returncode == 0, done.stderr
    (decoded,) = (tmp_path / "runs/sft/decoded").glob("*.jsonl")
    answer = json.loads(decoded.read_text())["text"]
    assert answer  # of a tiny model: it may be one character
    assert done.stdout == f"{answer}\n"
