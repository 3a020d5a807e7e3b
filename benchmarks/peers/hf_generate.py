"""Greedy `generate` of Hugging Face transformers with a cache; with `--write DIR SIZES` it writes the model.

It runs on the GPU if there is one. With `compile` in the task, the cache is static and the step compiled.
"""

from __future__ import annotations

import json
import pathlib
import sys

from steps import serve


def write(directory: str, sizes: dict) -> None:
    """Writes a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2))
    model.to(getattr(torch, sizes["dtype"])).save_pretrained(directory)


def prompts(task: dict) -> list[list[int]]:
    """Prompts of equal length."""
    return [[(7 * row + 31 * at) % 8000 + 10 for at in range(task["prompt"])] for row in range(task["batch"])]


def make_step(task: dict):
    """Generates one batch."""
    import torch
    from transformers import LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM.from_pretrained(task["directory"], dtype="auto").eval().to(device)
    ids, count = torch.tensor(prompts(task), device=device), task["tokens"]
    settings = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True, pad_token_id=0)
    if task.get("compile"):
        settings["cache_implementation"] = "static"  # `generate` compiles the step for it
    path = pathlib.Path(task["directory"]) / task["ids"]

    def step() -> None:
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        if not path.exists():
            path.write_text(json.dumps(found[:, task["prompt"] :].tolist()))

    return step, lambda: None


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(sys.argv[2], json.loads(sys.argv[3]))
    else:
        serve(make_step)
