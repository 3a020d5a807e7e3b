"""Models of other families as ours: their configuration, and their parameters in our tree."""

from __future__ import annotations

import copy
import pathlib

import fiddle as fdl
import jax
import numpy as np

from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.rotary_scaling import Llama31Scaling
from paxcli.layers.block import ParallelBlock
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.output_head import OutputHead
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.rms_norm import RmsNorm
from paxcli.models.language_model import LanguageModel

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf_families.npz"


def arrays_of(family: str) -> dict[str, np.ndarray]:
    """What `hf_families.py` computed; parameters in float32."""
    with np.load(DATA) as file:
        found = {name.removeprefix(f"{family}/"): file[name] for name in file if name.startswith(f"{family}/")}
    return {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in found.items()}


def _llama() -> fdl.Config[LanguageModel]:
    """What most have: RMS norms, rotary positions, a gated feed-forward without biases, a head of its own."""
    model = LanguageModel.config(
        vocab_size=61, max_seq_len=64, model_dims=32, hidden_dims=48, num_layers=2, num_heads=4
    )
    model.position, model.head = None, OutputHead.partial()
    model.stack.block.norm, model.final_norm = RmsNorm.partial(), RmsNorm.partial()
    model.stack.block.attention.rotary = Rotary.partial()
    feed_forward = model.stack.block.feed_forward
    feed_forward.activation, feed_forward.gated, feed_forward.use_bias = "silu", True, False
    return model


def llama2() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.stack.block.norm.epsilon = model.final_norm.epsilon = 1e-5
    return model


def llama31() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.num_kv_heads = 2
    scaling = Llama31Scaling.config(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=48)
    model.stack.block.attention.rotary = Rotary.partial(max_timescale=1000.0, scaling=scaling)
    return model


def mistral() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.num_kv_heads = 2
    model.stack.block.attention.window = 5
    return model


def qwen3() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.num_kv_heads, model.dims_per_head = 2, 12
    model.stack.block.attention.qk_norm = RmsNorm.partial()
    return model


def mixtral() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.num_kv_heads = 2
    model.stack.block.norm.epsilon = model.final_norm.epsilon = 1e-5
    model.stack.block.attention.rotary.max_timescale = 1e6
    model.stack.block.feed_forward = MoeFeedForward.partial(num_experts=4, num_experts_per_token=2)
    return model


def gemma2() -> fdl.Config[LanguageModel]:
    model = _llama()
    model.num_layers, model.num_kv_heads, model.dims_per_head = 4, 2, 12
    model.head, model.embedding.scale_sqrt_depth, model.embedding.logit_cap = None, True, 3.0
    block = model.stack.block
    block.post_norms, block.feed_forward.activation = True, "gelu"
    block.attention.query_scale, block.attention.logit_cap = 10**-0.5, 5.0
    local = copy.deepcopy(block)
    local.attention.window = 6
    model.stack = PatternedStack.partial(turns=(local, block))
    return model


def neox() -> fdl.Config[LanguageModel]:
    model = LanguageModel.config(
        vocab_size=61, max_seq_len=64, model_dims=32, hidden_dims=48, num_layers=2, num_heads=4
    )
    model.position, model.head = None, OutputHead.partial()
    model.stack.block = ParallelBlock.partial()
    model.stack.block.norm.epsilon = model.final_norm.epsilon = 1e-5
    model.stack.block.feed_forward.activation = "gelu_exact"
    attention = model.stack.block.attention
    attention.use_bias, attention.rotary = True, Rotary.partial(fraction=0.5)
    return model


def params_of(family: str, arrays: dict[str, np.ndarray], num_layers: int) -> dict:
    """HF's parameters in our tree."""
    hf = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    if family == "neox":
        return _neox_params(hf, num_layers)
    shift = 0 if family == "gemma2" else 1  # a norm's scale is stored as what is added to 1, by us and by Gemma
    layers = [_llama_layer(hf, f"model.layers.{i}.", shift) for i in range(num_layers)]
    params = {
        "embedding": {"table": hf["model.embed_tokens.weight"]},
        "stack": {"layers": _stacked(layers)},
        "final_norm": {"scale": hf["model.norm.weight"] - shift},
    }
    if family == "gemma2":
        params["stack"]["layers"] = {f"turn_{i}": _stacked(layers[i::2]) for i in range(2)}
    if "lm_head.weight" in hf:
        params["head"] = {"w": hf["lm_head.weight"].T}
    return params


def _stacked(layers: list[dict]) -> dict:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def _llama_layer(hf: dict[str, np.ndarray], prefix: str, shift: int) -> dict:
    def norm(name: str) -> dict:
        return {"scale": hf[f"{prefix}{name}.weight"] - shift}

    dims = hf["model.embed_tokens.weight"].shape[1]
    w = {x: hf[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkvo"}
    size = w["q"].shape[0] // 4
    attention = {
        name: w[x].T.reshape(dims, -1, size) for name, x in {"query": "q", "key": "k", "value": "v"}.items()
    } | {"post": w["o"].T.reshape(-1, size, dims)}
    if f"{prefix}self_attn.q_norm.weight" in hf:
        attention |= {"query_norm": norm("self_attn.q_norm"), "key_norm": norm("self_attn.k_norm")}
    layer = {"attention_norm": norm("input_layernorm"), "attention": attention}
    if f"{prefix}pre_feedforward_layernorm.weight" in hf:
        layer["attention_post_norm"] = norm("post_attention_layernorm")
        layer["feed_forward_norm"] = norm("pre_feedforward_layernorm")
        layer["feed_forward_post_norm"] = norm("post_feedforward_layernorm")
    else:
        layer["feed_forward_norm"] = norm("post_attention_layernorm")
    return layer | {"feed_forward": _feed_forward(hf, f"{prefix}mlp.")}


def _feed_forward(hf: dict[str, np.ndarray], prefix: str) -> dict:
    if f"{prefix}gate.weight" in hf:
        gate, up = np.split(hf[f"{prefix}experts.gate_up_proj"].swapaxes(1, 2), 2, axis=-1)
        router = hf[f"{prefix}gate.weight"].T
        return {"router": router, "w_gate": gate, "w_in": up, "w_out": hf[f"{prefix}experts.down_proj"].swapaxes(1, 2)}
    names = {"w_gate": "gate_proj", "w_in": "up_proj"}
    return {ours: hf[f"{prefix}{theirs}.weight"].T for ours, theirs in names.items()} | {
        "w_out": hf[f"{prefix}down_proj.weight"]
    }


def _neox_params(hf: dict[str, np.ndarray], num_layers: int) -> dict:
    def norm(name: str) -> dict:
        return {"scale": hf[f"{name}.weight"] - 1, "bias": hf[f"{name}.bias"]}

    layers = []
    for i in range(num_layers):
        prefix = f"gpt_neox.layers.{i}."
        w, bias = (hf[f"{prefix}attention.query_key_value.{kind}"] for kind in ("weight", "bias"))
        w, bias = w.reshape(4, 3, 8, 32), bias.reshape(4, 3, 8)  # of each head query, key and value
        attention = {}
        for at, name in enumerate(("query", "key", "value")):
            attention |= {name: w[:, at].transpose(2, 0, 1), f"{name}_bias": bias[:, at]}
        attention["post"] = hf[f"{prefix}attention.dense.weight"].T.reshape(4, 8, 32)
        attention["post_bias"] = hf[f"{prefix}attention.dense.bias"]
        feed_forward = {
            "w_in": hf[f"{prefix}mlp.dense_h_to_4h.weight"].T,
            "b_in": hf[f"{prefix}mlp.dense_h_to_4h.bias"],
            "w_out": hf[f"{prefix}mlp.dense_4h_to_h.weight"],
            "b_out": hf[f"{prefix}mlp.dense_4h_to_h.bias"],
        }
        norms = {"attention_norm": norm(f"{prefix}input_layernorm")}
        layers.append(norms | {"attention": attention, "feed_forward": feed_forward})
    return {
        "embedding": {"table": hf["gpt_neox.embed_in.weight"]},
        "stack": {"layers": _stacked(layers)},
        "final_norm": norm("gpt_neox.final_layer_norm"),
        "head": {"w": hf["lm_head.weight"].T},
    }
