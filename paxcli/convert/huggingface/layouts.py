"""The tensors of Hugging Face's model families as pax's parameters: rules, in both directions.

Matrices are [out, in] there, [in, out] in pax, with dimensions of heads [N, H] apart. GPT-2 stores [in, out], and
query, key and value as one tensor. Mixtral has tensors of their own for each expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import fiddle as fdl

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.reading import listing
from paxcli.convert.huggingface.config import FAMILIES, has_experts, is_latent
from paxcli.convert.layout import Layers, Layout, Rule, layer_rule, pax_layers
from paxcli.convert.runs import layer_kinds
from paxcli.convert.steps import Step, alternate, deinterleave, reshape, split, transpose, unstack
from paxcli.errors import ConfigError

_TRANSPOSED = (transpose(1, 0),)
_STEPS: dict[str, tuple[Step, ...]] = {  # of fields of families
    "same": (),
    "transposed": _TRANSPOSED,
    "alternating": (alternate(),),
    "halves": (split(-1),),
    "transposed_halves": (*_TRANSPOSED, split(-1)),
}
_QKV = ("query", "key", "value")
# Of embeddings.
TABLES = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight", "gpt_neox.embed_in.weight")
HEAD = "lm_head.weight"
_HEADS = (HEAD, "embed_out.weight")
TIED = (*TABLES, *_HEADS)
TEXT = "language_model."  # in the names of a multimodal model's text decoder
# Constants that old files have.
_UNUSED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def huggingface_layout(family: str, model: fdl.Config, params: Mapping[str, ArrayType]) -> Layout:
    """The rules for a model.

    Args:
      family: A key of `FAMILIES`.
      model: The model's recipe.
      params: Shapes of pax's parameters.

    Raises:
      ConfigError: The family has no tensor for a parameter.
    """
    blocks, num_first = layer_kinds(model)
    turns = ["sparse" if has_experts(block) else "dense" for block in blocks]
    parts = ["dense"] * num_first + [turns[i % len(turns)] for i in range(model.num_layers - num_first)]
    sides = Layers.of_stacks("{}", model.num_layers), pax_layers(params, model.num_layers)
    layout = Layout(_rules(family, model), *(layers.with_parts(parts) for layers in sides)).only(params)
    if left := layout.without_rule(params):
        raise ConfigError(f"{family} of Hugging Face has no tensor for {listing(left)}.", "Switch that off.")
    return layout


def text_names(names: Iterable[str], multimodal: bool) -> dict[str, str]:
    """Names of tensors in a text-only model → names in a file, which may be that of a multimodal model."""
    return {x.replace(TEXT, "", 1): x for x in names if not multimodal or TEXT in x or x == HEAD}


def modules_left_out(names: Iterable[str], kept: Mapping[str, str]) -> set[str]:
    """Modules of a multimodal model, such as `vision_tower`, whose tensors are not among those kept (`text_names`)."""
    return {x.removeprefix("model.").partition(".")[0] for x in {*names} - {*kept.values()}}


def saved_names(names: Collection[str], family: str, tied: bool, num_layers: int) -> dict[str, str]:
    """Names as `transformers` writes them now → names in a file, without what it does not read either.

    These are constants, copies of tied tables, and DeepSeek's layers after the last (multi-token prediction).
    """
    bare = family == "gpt2" and not any(name.startswith("transformer.") for name in names)
    kept = [name for name in names if not name.endswith(_UNUSED) and not (tied and name in _HEADS)]
    if FAMILIES[family].attention:
        of_layer = ((name, name.removeprefix("model.layers.").partition(".")[0]) for name in kept)
        kept = [name for name, layer in of_layer if not (layer.isdecimal() and int(layer) >= num_layers)]
    return {f"transformer.{name}" if bare else name: name for name in kept}


def _rules(family: str, model: fdl.Config) -> tuple[Rule, ...]:
    rule, blocks = functools.partial(layer_rule, FAMILIES[family].layers), layer_kinds(model)[0]
    attention_rules = _latent_rules if is_latent(blocks[0].attention) else _attention_rules
    return (
        *(Rule(name, pax, _TRANSPOSED if pax == "head.w" else ()) for pax, name in FAMILIES[family].outside.items()),
        Rule(FAMILIES[family].final_norm, "final_norm.scale", shift=_shift(family, model.final_norm)),
        *_named_rules(family, model, rule),
        *attention_rules(family, model, blocks[0].attention, rule),
        *_feed_forward_rules(family, blocks, rule),
    )


def _to_heads(inputs: int, *shape: int) -> tuple[Step, ...]:
    """[N H, D] -> [D, N, H]."""
    return (*_TRANSPOSED, reshape((inputs, math.prod(shape)), (inputs, *shape)))


def _attention_rules(family: str, model: fdl.Config, _: fdl.Partial, rule: Callable[..., Rule]) -> Iterator[Rule]:
    dims, heads, size = model.model_dims, model.num_heads, fdl.build(model).head_dims
    kv_heads, traits = model.num_kv_heads or heads, FAMILIES[family].traits
    adjacent = (deinterleave(),) if "adjacent_pairs" in traits else ()
    orient = 1 if "inputs_first" in traits else 0  # how many of the steps of a matrix are left out
    parts = {
        "query": ((heads, size), adjacent),
        "key": ((kv_heads, size), adjacent),
        "value": ((kv_heads, size), ()),
        "fused": ((heads + 2 * kv_heads, size), (split(-2, heads, kv_heads, kv_heads),)),
        "fused_heads": ((heads, 3, size), (unstack(-2),)),
    }
    for module, part in FAMILIES[family].projections.items():
        (shape, steps), names = parts[part], [f"attention.{x}" for x in (_QKV if "fused" in part else (part,))]
        yield rule(f"{module}.weight", names, *_to_heads(dims, *shape)[orient:], *steps)
        yield rule(f"{module}.bias", [f"{x}_bias" for x in names], reshape((math.prod(shape),), shape), *steps)
    to_post = (*_TRANSPOSED, reshape((heads * size, dims), (heads, size, dims)))
    yield rule(f"{FAMILIES[family].post}.weight", "attention.post", *to_post[orient:])


def _latent_rules(family: str, model: fdl.Config, latent: fdl.Partial, rule: Callable[..., Rule]) -> list[Rule]:
    """DeepSeek's. Its pairs of rotated features are adjacent, and pax's are (i, i + R/2)."""
    dims, heads, size = model.model_dims, model.num_heads, fdl.build(model).head_dims
    content = size - latent.rotary_dims
    values = latent.value_dims_per_head or content
    apart = split(2, content, latent.rotary_dims)
    query = (*_to_heads(latent.query_latent_dims or dims, heads, size), apart, deinterleave(1), apart.inverse)
    name = "q_proj" if latent.query_latent_dims is None else "q_b_proj"
    down = (*_TRANSPOSED, split(1, latent.latent_dims, latent.rotary_dims), deinterleave(1))
    up = (*_to_heads(latent.latent_dims, heads, content + values), split(2, content, values))
    to_post = reshape((heads * values, dims), (heads, values, dims))
    return [
        rule(f"self_attn.{name}.weight", "attention.query", *query),
        rule("self_attn.kv_a_proj_with_mqa.weight", ["attention.latent", "attention.rotary_key"], *down),
        rule("self_attn.kv_b_proj.weight", ["attention.key", "attention.value"], *up),
        rule("self_attn.o_proj.weight", "attention.post", *_TRANSPOSED, to_post),
    ]


def _named_rules(family: str, model: fdl.Config, rule: Callable[..., Rule]) -> Iterator[Rule]:
    """Those that need no sizes."""
    block = layer_kinds(model)[0][0]
    qk_norm = block.attention.latent_norm if is_latent(block.attention) else block.attention.qk_norm
    for foreign, pax in FAMILIES[family].norms.items():
        norm = qk_norm if pax.startswith("attention.") else block.norm
        yield rule(f"{foreign}.weight", f"{pax}.scale", shift=_shift(family, norm))
    part = "sparse" if FAMILIES[family].experts else "dense"
    for field, steps in _STEPS.items():
        for foreign, pax in getattr(FAMILIES[family], field).items():
            yield rule(foreign, pax, *steps, part=part if "feed_forward." in str(pax) else "layer")


def _shift(family: str, norm: fdl.Partial | None) -> float:
    """Pax's scale minus Hugging Face's: Gemma stores the factor less 1, the others the factor."""
    return 0.0 if norm is None else float("gemma" in FAMILIES[family].traits) - float(not norm.direct_scale)


def _feed_forward_rules(family: str, blocks: list[fdl.Config], rule: Callable[..., Rule]) -> Iterator[Rule]:
    mlp, stacked = FAMILIES[family].mlp, FAMILIES[family].alternating or FAMILIES[family].halves
    experts = next((range(block.feed_forward.num_experts) for block in blocks if has_experts(block)), ())
    for name, pax in FAMILIES[family].matrices.items():
        steps = () if pax == "w_out" else _TRANSPOSED
        yield rule(f"{mlp}.{name}.weight", f"feed_forward.{pax}", *steps, part="dense")
        if not stacked:
            of_each = [f"{mlp}.experts.{expert}.{name}.weight" for expert in experts]
            yield rule(of_each, f"feed_forward.{pax}", unstack(0).inverse, transpose(0, 2, 1), part="sparse")
