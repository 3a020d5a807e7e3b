"""Models of other families as ours: their configuration, and their parameters in our tree."""

from __future__ import annotations

import copy
import pathlib

import fiddle as fdl
import flax.linen as nn
import jax
import numpy as np

from paxcli.checkpoint.reading import named_leaves, nest_by_name
from paxcli.convert.huggingface.layouts import huggingface_layout
from paxcli.convert.layout import Layers, Layout, Rule
from paxcli.convert.steps import Step, reshape, transpose, unstack
from paxcli.inputs.base_input import language_spec
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.rotary_scaling import Llama31Scaling
from paxcli.layers.block import ParallelBlock
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.output_head import OutputHead
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.rms_norm import RmsNorm
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.convert.filling import to_pax

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf_families.npz"


def arrays_of(family: str) -> dict[str, np.ndarray]:
    """What `hf_families.py` computed; parameters in float32."""
    with np.load(DATA) as file:
        found = {name.removeprefix(f"{family}/"): file[name] for name in file if name.startswith(f"{family}/")}
    return {name: x.astype(np.float32) if x.dtype == np.float16 else x for name, x in found.items()}


def _llama() -> fdl.Config[LanguageModel]:
    """Most families: RMS norms, rotary positions, a gated feed-forward without biases, a head of its own."""
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


def params_of(family: str, arrays: dict[str, np.ndarray]) -> dict:
    """HF's parameters in pax's tree."""
    hf = {name.removeprefix("param/"): x for name, x in arrays.items() if name.startswith("param/")}
    if family == "neox":  # its second norm is equal to the first, the only one of pax's ParallelBlock
        hf = {name: x for name, x in hf.items() if ".post_attention_layernorm." not in name}
    else:
        hf = as_saved(hf)
    layout = layout_of(family)
    assert layout.without_rule(hf, "foreign") == []
    return nest_by_name(to_pax(layout, hf))


def layout_of(family: str) -> Layout:
    """How HF holds the parameters of a family."""
    model = globals()[family]()
    if family == "neox":
        ours = Layers.of_stacks("layers", 1, (model.num_layers,))
        return Layout(_neox_rules(), Layers.of_stacks("{}", model.num_layers), ours)
    kind = "llama" if family.startswith("llama") else family
    batch = NestedMap(language_spec(1, 4))
    shapes = jax.eval_shape(fdl.build(model).init, jax.random.key(0), batch)["params"]
    return huggingface_layout(kind, model, named_leaves(nn.meta.unbox(shapes)))


def as_saved(hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters as `transformers` saves them: of Mixtral, each expert has tensors of its own."""
    saved = {}
    for name, x in hf.items():
        prefix, is_expert, which = name.partition(".mlp.experts.")
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(which, ())
        for expert in range(len(x) if is_expert else 0):
            for part, half in zip(parts, np.split(x[expert], len(parts)), strict=True):
                saved[f"{prefix}.block_sparse_moe.experts.{expert}.{part}.weight"] = half
        if not is_expert:
            saved[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = x
    return saved


_TRANSPOSED = (transpose(1, 0),)


def _neox_rules() -> tuple[Rule, ...]:
    heads, size, dims = 4, 8, 32

    def rule(foreign: str, pax: str | tuple[str, ...], *steps: Step, shift: float = 0.0) -> Rule:
        names = tuple(f"stack.{{layer}}.{name}" for name in ([pax] if isinstance(pax, str) else pax))
        return Rule(f"gpt_neox.layers.{{layer}}.{foreign}", names, steps, shift=shift)

    def qkv(*more: int) -> tuple[Step, ...]:  # of each head query, key and value
        return (reshape((heads * 3 * size, *more), (heads, 3, size, *more)), unstack(1))

    to_heads = (transpose(2, 0, 1),)  # [N, H, D] -> [D, N, H], of each of three
    return (
        Rule("gpt_neox.embed_in.weight", "embedding.table"),
        Rule("gpt_neox.final_layer_norm.weight", "final_norm.scale", shift=-1.0),
        Rule("gpt_neox.final_layer_norm.bias", "final_norm.bias"),
        Rule("lm_head.weight", "head.w", _TRANSPOSED),
        rule("input_layernorm.weight", "attention_norm.scale", shift=-1.0),
        rule("input_layernorm.bias", "attention_norm.bias"),
        rule("attention.query_key_value.weight", tuple(f"attention.{x}" for x in _QKV), *qkv(dims), *to_heads),
        rule("attention.query_key_value.bias", tuple(f"attention.{x}_bias" for x in _QKV), *qkv()),
        rule("attention.dense.weight", "attention.post", *_TRANSPOSED, reshape((dims, dims), (heads, size, dims))),
        rule("attention.dense.bias", "attention.post_bias"),
        rule("mlp.dense_h_to_4h.weight", "feed_forward.w_in", *_TRANSPOSED),
        rule("mlp.dense_h_to_4h.bias", "feed_forward.b_in"),
        rule("mlp.dense_4h_to_h.weight", "feed_forward.w_out"),
        rule("mlp.dense_4h_to_h.bias", "feed_forward.b_out"),
    )


_QKV = ("query", "key", "value")
