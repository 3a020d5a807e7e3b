"""Makes `hf_more_families.npz`, with HF `transformers` 5 and PyTorch: `python tests/data/hf_more_families.py`.

Of each family what `save_pretrained` writes of a model of random weights, moved off their initial values and rounded to
float16: the tensors and config.json; with rows of random tokens, and the logits of each token.
"""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager")
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
MOE = dict(head_dim=12, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
GEMMA3 = dict(num_hidden_layers=7, head_dim=12, query_pre_attn_scalar=10, sliding_window=6)

CONFIGS = [
    Qwen2Config(**SIZES),
    Qwen3MoeConfig(**SIZES, **MOE),
    GemmaConfig(**SIZES, head_dim=12),
    Gemma3TextConfig(**{**SIZES, **GEMMA3}),
    Phi3Config(**SIZES, sliding_window=7),
    Olmo2Config(**SIZES),
]


def model_arrays(config) -> dict[str, np.ndarray]:
    """The saved tensors, config.json as text, ids and logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).half())
        logits = model(ids).logits.numpy()
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "model.safetensors")
        text = (pathlib.Path(folder) / "config.json").read_text()
    arrays = {f"param/{name}": x.astype(np.float16) for name, x in tensors.items()}
    return arrays | {"config": np.array(text), "in/ids": ids.numpy(), "out/logits": logits}


if __name__ == "__main__":
    families = {config.model_type: model_arrays(config) for config in CONFIGS}
    arrays = {f"{family}/{name}": x for family, found in families.items() for name, x in found.items()}
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
