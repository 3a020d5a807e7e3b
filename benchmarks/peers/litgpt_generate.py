"""Greedy decoding of litgpt, with its KV cache."""

from __future__ import annotations

import json
import pathlib

from hf_generate import prompts
from steps import serve


def make_step(task: dict):
    """Generates one batch."""
    import torch
    from litgpt import GPT, Config
    from litgpt.generate.base import batched_generate_fn, generate
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    directory = pathlib.Path(task["directory"])
    sizes = json.loads((directory / "config.json").read_text())
    config = Config(
        name="random-llama",
        block_size=sizes["max_position_embeddings"],
        padded_vocab_size=sizes["vocab_size"],
        n_layer=sizes["num_hidden_layers"],
        n_head=sizes["num_attention_heads"],
        n_query_groups=sizes["num_key_value_heads"],
        n_embd=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=sizes["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    weights: dict = {}
    copy_weights_hf_llama(config, {}, weights, load_file(directory / "model.safetensors"))
    model = GPT(config).eval()
    model.load_state_dict(weights)
    ids, length = torch.tensor(prompts(task)), task["prompt"] + task["tokens"]
    model.max_seq_length = length
    model.set_kv_cache(len(ids))
    path = directory / task["ids"]

    def step() -> None:
        with torch.inference_mode():
            if len(ids) == 1:
                found = [generate(model, ids[0], length, temperature=0.0, top_p=0.0, include_prompt=False).tolist()]
            else:
                greedy = {"temperature": 0.0, "top_p": 0.0}
                columns = batched_generate_fn(
                    model, ids, length, sample_args=greedy, include_prompt=False, include_eos=True
                )
                found = torch.stack([torch.cat([token.view(1) for token in column]) for column in columns], 1).tolist()
        if not path.exists():
            path.write_text(json.dumps(found))

    return step, lambda: None


if __name__ == "__main__":
    serve(make_step)
