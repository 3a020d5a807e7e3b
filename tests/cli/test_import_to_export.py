"""From weights of Hugging Face to weights of Hugging Face: import, SFT with LoRA, eval, chat, export, the same text."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest
import yaml

from tests.convert.huggingface.directories import write_directory, write_tokenizer

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
# Run by the Python that TORCH_PYTHON names, with torch and transformers.
GENERATE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1] + "/tokenizer.json")
ids = tokenizer(sys.argv[2], return_tensors="pt").input_ids
found = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
print(json.dumps(found[0, ids.shape[1]:].tolist()))
"""


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
    if "TORCH_PYTHON" not in os.environ:
        pytest.skip("the comparison with transformers needs TORCH_PYTHON, a Python with torch and transformers")
    command = [os.environ["TORCH_PYTHON"], "-c", GENERATE, "merged", "user: what is 7?\n"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == text
