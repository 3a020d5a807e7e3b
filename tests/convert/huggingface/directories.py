"""Hugging Face directories of tiny models, with the tensors that transformers computed logits from."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models import hf_families

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(max_position_embeddings=64, torch_dtype="float32")
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 48}
GEMMA2 = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 10}
GEMMA2 |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 6}
GEMMA2 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_activation": "gelu_pytorch_tanh"}
MIXTRAL = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MIXTRAL |= {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
GPT2 = dict(vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4, n_inner=80, torch_dtype="float32")

# What `tests/data/hf_families.py` and `hf_gpt2.py` made models of, as transformers 4 and 5 write it.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5},
    "llama31": SIZES
    | {"model_type": "llama", "num_key_value_heads": 2, "rope_parameters": LLAMA31 | {"rope_theta": 1000.0}},
    "mistral": SIZES | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5, "head_dim": None},
    "qwen3": SIZES | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    "gemma2": SIZES | GEMMA2 | {"model_type": "gemma2"},
    "mixtral": SIZES | MIXTRAL | {"model_type": "mixtral"},
    "gpt2": GPT2 | {"model_type": "gpt2", "activation_function": "gelu_new"},
}


# Families whose tensors and config.json are stored as transformers saved them.
with np.load(hf_families.DATA.with_name("hf_more_families.npz")) as _file:
    _SAVED = {name: _file[name] for name in _file}
CONFIGS |= {name.removesuffix("/config"): json.loads(str(x)) for name, x in _SAVED.items() if name.endswith("/config")}
WITH_IMAGES = CONFIGS.pop("gemma3")
"""A multimodal model."""


def arrays_of(family: str) -> dict[str, np.ndarray]:
    """Parameters, ids and logits."""
    if f"{family}/config" in _SAVED:
        found = {name.removeprefix(f"{family}/"): x for name, x in _SAVED.items() if name.startswith(f"{family}/")}
        return {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in found.items()}
    if family != "gpt2":
        return hf_families.arrays_of(family)
    with np.load(hf_families.DATA.with_name("hf_gpt2.npz")) as file:
        return dict(file)


def tensors_of(family: str) -> dict[str, np.ndarray]:
    """The tensors as transformers saves them."""
    arrays = arrays_of(family)
    params = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    if family == "gpt2":
        return {f"transformer.{name}": x for name, x in params.items()}
    if f"{family}/config" in _SAVED:
        return params
    return hf_families.as_saved(params)


def write_directory(path: pathlib.Path, family: str, **more: Any) -> pathlib.Path:
    """A directory of one file; `more`: further keys of its config.json."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIGS, "gemma3": WITH_IMAGES}[family] | more))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors_of(family).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_tokenizer(path: pathlib.Path) -> None:
    """A tokenizer of single characters."""
    import tokenizers

    characters = "\n !\"#'()*,-.:=_abcdefghijklmnopqrstuvwxyz0123456789<>"
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
