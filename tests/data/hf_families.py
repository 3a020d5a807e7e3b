"""Makes `hf_families.npz`, with HF `transformers` 5 and PyTorch: `python tests/data/hf_families.py`.

Of each family a model of random weights, moved off their initial values and rounded to float16, on rows of random
tokens; of the logits, those of each token. Of T5, one attention of a decoder and one of an encoder, each with a bias
for the distance.
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    T5Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.t5.modeling_t5 import T5Attention

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=64, attn_implementation="eager")
LLAMA31_ROPE = dict(
    rope_type="llama3",
    rope_theta=1000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=48,
)
GEMMA = dict(
    num_key_value_heads=2,
    head_dim=12,
    query_pre_attn_scalar=10,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"] * 2,
)

FAMILIES = {
    "llama2": LlamaConfig(**SIZES, rms_norm_eps=1e-5),
    "llama31": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LLAMA31_ROPE),
    "gemma2": Gemma2Config(**{**SIZES, "num_hidden_layers": 4}, **GEMMA),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5),
    "mixtral": MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "neox": GPTNeoXConfig(**SIZES, rotary_pct=0.5, use_parallel_residual=True),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=12),
}


def model_arrays(config) -> dict[str, np.ndarray]:
    """The parameters, ids and logits of a model of this configuration; of Mixtral, its load-balance loss too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).half())
        if config.model_type == "gpt_neox":  # one norm for both halves of a block
            for layer in model.gpt_neox.layers:
                layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
        ids = torch.randint(0, 61, (2, 20))
        routers = {"output_router_logits": True} if config.model_type == "mixtral" else {}
        out = model(ids, **routers)
    arrays = {f"param/{name}": value.detach().numpy().astype(np.float16) for name, value in model.named_parameters()}
    arrays |= {"in/ids": ids.numpy(), "out/logits": out.logits.detach().numpy()}
    if routers:  # of each row and layer alone, then the mean
        rows = [layer.reshape(2, 20, -1)[row] for layer in out.router_logits for row in range(2)]
        losses = [load_balancing_loss_func((row,), config.num_local_experts, 2) for row in rows]
        arrays["out/load_balance_loss"] = torch.stack(losses).mean().detach().numpy()
    return arrays


def t5_arrays() -> dict[str, np.ndarray]:
    """One self-attention of a decoder, and one of an encoder, on random activations."""
    torch.manual_seed(0)
    arrays = {}
    for kind in ("decoder", "encoder"):
        config = T5Config(d_model=32, num_heads=4, d_kv=8, is_decoder=kind == "decoder", dropout_rate=0.0)
        config.relative_attention_num_buckets, config.relative_attention_max_distance = 8, 12
        attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
        x = torch.randn(2, 20, 32)
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_((0.3 * torch.randn_like(parameter)).half())
            hidden = torch.triu(torch.full((20, 20), -1e9), 1)[None, None] if kind == "decoder" else None
            y = attention(x, mask=hidden)[0]
        arrays |= {f"{kind}/param/{name}": value.detach().numpy() for name, value in attention.named_parameters()}
        arrays |= {f"{kind}/in/x": x.numpy(), f"{kind}/out/y": y.numpy()}
    return arrays


def rotary_arrays() -> dict[str, np.ndarray]:
    """Frequencies of the ways to scale rotations that no family above has, and what sine and cosine are times."""
    arrays = {}
    for kind in ("linear", "yarn"):
        rope = dict(rope_type=kind, rope_theta=1000.0, factor=8.0, original_max_position_embeddings=64)
        config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=512)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        arrays |= {f"{kind}/frequencies": frequencies.numpy(), f"{kind}/factor": np.float32(factor)}
    return arrays


if __name__ == "__main__":
    arrays = {f"{family}/{name}": x for family, config in FAMILIES.items() for name, x in model_arrays(config).items()}
    arrays |= {f"t5/{name}": x for name, x in t5_arrays().items()}
    arrays |= {f"rotary/{name}": x for name, x in rotary_arrays().items()}
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
