"""Makes `hf_more_families.npz`, with HF `transformers` 5 and PyTorch: `python tests/data/hf_more_families.py`.

Of each family what `save_pretrained` writes of a model of random weights, moved off their initial values and rounded to
float16: the tensors and config.json; with rows of random tokens, the logits of each token, and the gradient of the sum
of their sines with respect to the embedding.
"""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager")
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
MOE = dict(head_dim=12, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
GEMMA3 = dict(num_hidden_layers=7, head_dim=12, query_pre_attn_scalar=10, sliding_window=6)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)
MLA = dict(num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
MLA |= dict(v_head_dim=6, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3)
MLA |= dict(moe_intermediate_size=12, n_group=4, topk_group=2, pad_token_id=None)
V2 = dict(q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=4.0)
V2 |= dict(rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 1.0})
V3 = dict(q_lora_rank=12, num_nextn_predict_layers=0)
V3 |= dict(rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
QWEN2_MOE = dict(moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4, num_experts_per_tok=2)
OLMO3 = dict(num_hidden_layers=4, sliding_window=6)
OLMO3 |= dict(rope_parameters={"full_attention": YARN, "sliding_attention": dict(rope_type="default", rope_theta=1e3)})
GPT_OSS = dict(num_hidden_layers=4, head_dim=12, sliding_window=6, num_local_experts=4, num_experts_per_tok=2)
GPT_OSS |= dict(rope_parameters={**YARN, "truncate": False})
LLAMA4 = dict(num_hidden_layers=4, head_dim=12, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4)
LLAMA4 |= dict(attention_chunk_size=6, floor_scale=4)
VISION = dict(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3_ROPE |= dict(original_max_position_embeddings=16)

CONFIGS = [
    Qwen2Config(**SIZES),
    Qwen3MoeConfig(**SIZES, **MOE),
    GemmaConfig(**SIZES, head_dim=12),
    Gemma3TextConfig(**{**SIZES, **GEMMA3}),
    Phi3Config(**SIZES, sliding_window=7),
    Olmo2Config(**SIZES),
    DeepseekV2Config(**{**SIZES, **MLA, **V2}),
    DeepseekV3Config(**{**SIZES, **MLA, **V3}),
    Qwen2MoeConfig(**SIZES, **QWEN2_MOE),
    Olmo3Config(**{**SIZES, **OLMO3}),
    GptOssConfig(**{**SIZES, **GPT_OSS}),
    Llama4TextConfig(**{**SIZES, **LLAMA4}, rope_parameters=LLAMA3_ROPE),
    OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    SeedOssConfig(**SIZES, head_dim=12),
    SmolLM3Config(**{**SIZES, "num_hidden_layers": 8}),
    GPTNeoXConfig(**SIZES, rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.5)),
    PhiConfig(**SIZES),
    Starcoder2Config(**SIZES, sliding_window=7),
    StableLmConfig(**SIZES, use_qkv_bias=True),
    # A text decoder within a model that reads images, of which it gets none here.
    Gemma3Config(text_config={**SIZES, **GEMMA3}, vision_config=VISION, mm_tokens_per_image=4, image_token_index=60),
]
# Of the same families, by name.
OTHERS = {
    "llama4_text_alternating": Llama4TextConfig(  # as the model with 128 experts
        **{**SIZES, **LLAMA4}, interleave_moe_layer_step=2, use_qk_norm=False
    ),
    "gpt_neox_sequential": GPTNeoXConfig(
        **SIZES, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new"
    ),
    "phi_tied": PhiConfig(**SIZES, tie_word_embeddings=True, hidden_act="gelu"),
    "starcoder2_without_bias": Starcoder2Config(**SIZES, use_bias=False, tie_word_embeddings=False),
    "stablelm_parallel": StableLmConfig(**SIZES, use_parallel_residual=True),
}


def model_arrays(config) -> dict[str, np.ndarray]:
    """The saved tensors, config.json as text, ids and logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        biases = [x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).half())
    logits = model(ids).logits
    logits.sin().sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "model.safetensors")
        text = (pathlib.Path(folder) / "config.json").read_text()
    arrays = {f"param/{name}": x.astype(np.float16) for name, x in tensors.items()}
    arrays |= {"config": np.array(text), "in/ids": ids.numpy(), "out/logits": logits.detach().numpy()}
    return arrays | {"out/table_gradient": model.get_input_embeddings().weight.grad.numpy()}


if __name__ == "__main__":
    families = {config.model_type: model_arrays(config) for config in CONFIGS}
    families |= {name: model_arrays(config) for name, config in OTHERS.items()}
    arrays = {f"{family}/{name}": x for family, found in families.items() for name, x in found.items()}
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
