"""The tensors of Hugging Face's model families as pax's parameters: rules, in both directions.

Matrices are [out, in] there, [in, out] in pax, with dimensions of heads [N, H] apart. GPT-2 stores [in, out], and
query, key and value as one tensor. Mixtral has tensors of their own for each expert.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

import fiddle as fdl

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.reading import listing
from paxcli.convert.huggingface.config import FAMILIES, is_latent
from paxcli.convert.layout import (
    Layers,
    Layout,
    Rule,
    Step,
    alternate,
    deinterleave,
    pax_layers,
    reshape,
    split,
    transpose,
    unstack,
)
from paxcli.errors import ConfigError
from paxcli.layers.patterned_stack import PatternedStack

_TRANSPOSED = (transpose(1, 0),)
_QKV = ("query", "key", "value")
_UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that old files have


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, and the differences in the numbers of its norms.

    Attributes:
      num_layers: L.
      model_dims: D.
      num_heads: N.
      num_kv_heads: K.
      dims_per_head: H.
      hidden_dims: F.
      num_experts: E; 0 = no experts.
      num_first: Layers without experts before those with.
      latent: Template of the attention, if it is latent attention.
      norm_shift: Pax's scale of the norms in layers minus Hugging Face's.
      qk_norm_shift: The same of the norms of queries and keys.
      final_norm_shift: The same of the last norm.
    """

    num_layers: int
    model_dims: int
    num_heads: int
    num_kv_heads: int
    dims_per_head: int
    hidden_dims: int
    num_experts: int = 0
    num_first: int = 0
    latent: fdl.Partial | None = None
    norm_shift: float = 0.0
    qk_norm_shift: float = 0.0
    final_norm_shift: float = 0.0


def sizes_of(model: fdl.Config, family: str) -> ModelSizes:
    """The sizes of a recipe's model."""
    traits = FAMILIES[family].traits
    patterned = issubclass(fdl.get_callable(model.stack), PatternedStack)  # pyrefly: ignore
    block = model.stack.turns[0] if patterned else model.stack.block
    attention = block.attention
    size = model.dims_per_head or model.model_dims // model.num_heads
    latent = attention if is_latent(attention) else None

    def shift(norm: fdl.Partial | None) -> float:  # Gemma stores the factor less 1, the others the factor
        return 0.0 if norm is None else float("gemma" in traits) - float(not norm.direct_scale)

    return ModelSizes(
        num_layers=model.num_layers,
        model_dims=model.model_dims,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        dims_per_head=size,
        hidden_dims=model.hidden_dims,
        num_experts=block.feed_forward.num_experts if FAMILIES[family].experts else 0,
        num_first=model.stack.num_first if patterned else 0,
        latent=latent,
        norm_shift=shift(block.norm),
        qk_norm_shift=shift(attention.latent_norm if latent else attention.qk_norm),
        final_norm_shift=shift(model.final_norm),
    )


def huggingface_layout(family: str, sizes: ModelSizes, params: Mapping[str, ArrayType]) -> Layout:
    """The rules for a model.

    Args:
      family: A key of `FAMILIES`.
      sizes: The model's.
      params: Shapes of pax's parameters.

    Raises:
      ConfigError: The family has no tensor for a parameter.
    """
    rules = _gpt2_rules(sizes) if family == "gpt2" else _llama_rules(family, sizes)
    sides = Layers.of_separate_tensors(sizes.num_layers), pax_layers(params, sizes.num_layers)
    layout = Layout(rules, *(layers.with_parts(sizes.num_first) for layers in sides)).only(params)
    left = layout.without_rule(params)
    if left:
        raise ConfigError(f"{family} of Hugging Face has no tensor for {listing(left)}.", "Switch that off.")
    return layout


def saved_names(names: Collection[str], family: str, tied: bool, num_layers: int) -> dict[str, str]:
    """Names as `transformers` writes them now → names in a file, without what it does not read either.

    These are constants, copies of tied tables, and DeepSeek's layers after the last (multi-token prediction).
    """
    bare = family == "gpt2" and not any(name.startswith("transformer.") for name in names)
    kept = [name for name in names if not name.endswith(_UNUSED) and not (tied and name == "lm_head.weight")]
    if FAMILIES[family].attention:
        of_layer = ((name, name.removeprefix("model.layers.").partition(".")[0]) for name in kept)
        kept = [name for name, layer in of_layer if not (layer.isdecimal() and int(layer) >= num_layers)]
    return {f"transformer.{name}" if bare else name: name for name in kept}


def _rule(
    layers: str,
    foreign: str | list[str],
    pax: str | list[str],
    *steps: Step,
    shift: float = 0.0,
    part: Literal["layer", "first", "rest"] = "layer",
) -> Rule:
    """A rule for a parameter within all layers, or a part of them, or for several that are one on the other side."""
    theirs, ours = ([names] if isinstance(names, str) else names for names in (foreign, pax))
    names = tuple(f"{layers}.{{{part}}}.{name}" for name in theirs), tuple(f"stack.{{{part}}}.{name}" for name in ours)
    return Rule(*names, steps, shift=shift)


def _llama_rules(family: str, sizes: ModelSizes) -> tuple[Rule, ...]:
    rule = functools.partial(_rule, "model.layers")
    traits = FAMILIES[family].traits
    after, before = "attention_post_norm", "feed_forward_norm"
    norms = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": after if "post_norms" in traits else before,
        "pre_feedforward_layernorm": before,
        "post_feedforward_layernorm": "feed_forward_post_norm",
    }
    norms = norms if "post_norms" in traits else dict(list(norms.items())[:2])
    return (
        Rule("model.embed_tokens.weight", "embedding.table"),
        Rule("model.norm.weight", "final_norm.scale", shift=sizes.final_norm_shift),
        Rule("lm_head.weight", "head.w", _TRANSPOSED),
        *(rule(f"{name}.weight", f"{pax}.scale", shift=sizes.norm_shift) for name, pax in norms.items()),
        *(_attention_rules(traits, sizes, rule) if sizes.latent is None else _latent_rules(sizes, sizes.latent, rule)),
        *_feed_forward_rules(family, sizes, rule),
        *_named_rules(family, rule),
    )


def _to_heads(inputs: int, heads: int, size: int) -> tuple[Step, ...]:
    """[N H, D] -> [D, N, H]."""
    return (*_TRANSPOSED, reshape((inputs, heads * size), (inputs, heads, size)))


def _attention_rules(traits: Collection[str], sizes: ModelSizes, rule: Callable[..., Rule]) -> list[Rule]:
    dims, heads, kv_heads, size = sizes.model_dims, sizes.num_heads, sizes.num_kv_heads, sizes.dims_per_head
    projections = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    qkv = [
        rule(f"self_attn.{name}.weight", f"attention.{pax}", *_to_heads(dims, count, size))
        for (name, count), pax in zip(projections.items(), _QKV, strict=True)
    ]
    if "fused" in traits:
        steps = *_to_heads(dims, heads + 2 * kv_heads, size), split(1, heads, kv_heads, kv_heads)
        qkv = [rule("self_attn.qkv_proj.weight", [f"attention.{x}" for x in _QKV], *steps)]
    qkv += [
        rule(f"self_attn.{name}.bias", f"attention.{pax}_bias", reshape((count * size,), (count, size)))
        for (name, count), pax in zip(projections.items(), _QKV, strict=True)
    ]
    to_post = reshape((heads * size, dims), (heads, size, dims))
    return [
        *qkv,
        rule("self_attn.q_norm.weight", "attention.query_norm.scale", shift=sizes.qk_norm_shift),
        rule("self_attn.k_norm.weight", "attention.key_norm.scale", shift=sizes.qk_norm_shift),
        rule("self_attn.o_proj.weight", "attention.post", *_TRANSPOSED, to_post),
    ]


def _latent_rules(sizes: ModelSizes, latent: fdl.Partial, rule: Callable[..., Rule]) -> list[Rule]:
    """DeepSeek's. Its pairs of rotated features are adjacent, and pax's are (i, i + R/2)."""
    dims, heads, size = sizes.model_dims, sizes.num_heads, sizes.dims_per_head
    content = size - latent.rotary_dims
    values = latent.value_dims_per_head or content
    apart = split(2, content, latent.rotary_dims)
    in_halves = (apart, deinterleave(1), apart.inverse)
    query = (*_to_heads(latent.query_latent_dims or dims, heads, size), *in_halves)
    name = "q_proj" if latent.query_latent_dims is None else "q_b_proj"
    down = (*_TRANSPOSED, split(1, latent.latent_dims, latent.rotary_dims), deinterleave(1))
    up = (*_to_heads(latent.latent_dims, heads, content + values), split(2, content, values))
    to_post = reshape((heads * values, dims), (heads, values, dims))
    return [
        rule("self_attn.q_a_layernorm.weight", "attention.query_norm.scale", shift=sizes.qk_norm_shift),
        rule(f"self_attn.{name}.weight", "attention.query", *query),
        rule("self_attn.kv_a_proj_with_mqa.weight", ["attention.latent", "attention.rotary_key"], *down),
        rule("self_attn.kv_a_layernorm.weight", "attention.kv_norm.scale", shift=sizes.qk_norm_shift),
        rule("self_attn.kv_b_proj.weight", ["attention.key", "attention.value"], *up),
        rule("self_attn.o_proj.weight", "attention.post", *_TRANSPOSED, to_post),
    ]


def _named_rules(family: str, rule: Callable[..., Rule]) -> Iterator[Rule]:
    """Those that need no sizes."""
    for field, steps in (("same", ()), ("transposed", _TRANSPOSED), ("alternating", (alternate(),))):
        for foreign, pax in getattr(FAMILIES[family], field).items():
            yield rule(foreign, pax, *steps, part="rest" if "feed_forward." in str(pax) else "layer")


def _feed_forward_rules(family: str, sizes: ModelSizes, rule: Callable[..., Rule]) -> list[Rule]:
    names = {"gate_proj": "w_gate", "up_proj": "w_in", "down_proj": "w_out"}
    wide = ("gate_proj", "up_proj")
    if "fused" in FAMILIES[family].traits:
        halves, in_two = ["feed_forward.w_gate", "feed_forward.w_in"], split(1, sizes.hidden_dims, sizes.hidden_dims)
        down = rule("mlp.down_proj.weight", "feed_forward.w_out")
        return [rule("mlp.gate_up_proj.weight", halves, *_TRANSPOSED, in_two), down]
    dense = functools.partial(rule, part="first" if sizes.num_experts else "layer")
    rules = [dense(f"mlp.{name}.weight", f"feed_forward.{names[name]}", *_TRANSPOSED) for name in wide]
    rules.append(dense("mlp.down_proj.weight", "feed_forward.w_out"))
    if not sizes.num_experts or FAMILIES[family].alternating:
        return rules if not sizes.num_experts else []
    mlp = "block_sparse_moe" if family == "mixtral" else "mlp"
    names = {"w1": "w_gate", "w2": "w_out", "w3": "w_in"} if family == "mixtral" else names
    experts = [
        rule(
            [f"{mlp}.experts.{expert}.{name}.weight" for expert in range(sizes.num_experts)],
            f"feed_forward.{pax}",
            unstack(0).inverse,
            transpose(0, 2, 1),
            part="rest",
        )
        for name, pax in names.items()
    ]
    return experts + (rules if sizes.num_first else [])


def _gpt2_rules(sizes: ModelSizes) -> tuple[Rule, ...]:
    dims, shape = sizes.model_dims, (sizes.num_heads, sizes.dims_per_head)
    thirds = (dims, dims, dims)

    rule = functools.partial(_rule, "transformer.h")
    qkv = [f"attention.{name}" for name in _QKV]
    biases = [f"{name}_bias" for name in qkv]
    norms = {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}
    return (
        Rule("transformer.wte.weight", "embedding.table"),
        Rule("transformer.wpe.weight", "position.table"),
        Rule("transformer.ln_f.weight", "final_norm.scale", shift=sizes.final_norm_shift),
        Rule("transformer.ln_f.bias", "final_norm.bias"),
        *(rule(f"{name}.weight", f"{pax}.scale", shift=sizes.norm_shift) for name, pax in norms.items()),
        rule("attn.c_attn.weight", qkv, split(1, *thirds), reshape((dims, dims), (dims, *shape))),
        rule("attn.c_attn.bias", biases, split(0, *thirds), reshape((dims,), shape)),
        rule("attn.c_proj.weight", "attention.post", reshape((dims, dims), (*shape, dims))),
        *_named_rules("gpt2", rule),
    )
