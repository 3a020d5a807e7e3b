"""Names, axes and scales of MaxText's arrays for each of pax's parameters.

The numbers are the same unless a scale or a shift is named:

- MaxText stacks layers along dimension `param_scan_axis`, by default the second; pax along the first.
- `wo` is [F, D] in MaxText and [D, F] in pax; the relative position table [N, buckets] and [buckets, N].
- With Llama 3.1's RoPE, MaxText rotates adjacent features of a head, pax features i and i + H/2.
- A layer of MaxText's Gemma 2 is two of pax's, `…_local` and `…_global`. Of Gemma 3, six layers are one scanned
  block, and the layers that remain are apart.
- Query, key and value may be one array, [E, 3, N, H] or [E, N + 2 K, H], and so may the two halves of a gated
  feed-forward.
- In most blocks, MaxText does not multiply queries by 1 / sqrt(H): their weights are smaller instead.
- The scale of an RMS norm is the factor in MaxText; in pax it may be the factor less 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.reading import listing
from paxcli.convert.layout import Layers, Layout, Rule, Slot, layer_rule, pax_layers
from paxcli.convert.maxtext import tables
from paxcli.convert.steps import Step, deinterleave, split, transpose, unstack
from paxcli.errors import ConfigError

_PAX_NORMS = ("attention_norm", "feed_forward_norm", "attention_post_norm", "feed_forward_post_norm")


@dataclasses.dataclass(frozen=True)
class MaxTextLayout:
    """How a MaxText checkpoint holds a model; its numbers differ by pax = MaxText * scale + shift.

    Attributes:
      block: MaxText's `decoder_block`.
      num_layers: L, as pax counts.
      scanned: Whether its layers are stacked (`scan_layers`).
      scan_axis: Along which dimension (`param_scan_axis`).
      fused_qkv: Whether query, key and value are one array.
      fused_heads: Heads of query, key and value, if that array has them in one dimension, as in most blocks since July
        2026; None = it has a dimension of 3, [E, 3, N, H].
      fused_mlp: Whether both halves of a gated feed-forward are.
      query_scale: Of query weights, or of the norm after them if there is one.
      norm_shift: Of the scales of norms in layers.
      qk_norm_shift: Of the scales of query and key norms.
      final_norm_shift: Of the scale of the last norm.
      adjacent_pairs: Whether MaxText's RoPE rotates adjacent features.
    """

    block: str
    num_layers: int
    scanned: bool = True
    scan_axis: int = 1
    fused_qkv: bool = False
    fused_heads: tuple[int, int, int] | None = None
    fused_mlp: bool = False
    query_scale: float = 1.0
    norm_shift: float = 0.0
    qk_norm_shift: float = 0.0
    final_norm_shift: float = 0.0
    adjacent_pairs: bool = False


def layout_of(maxtext: MaxTextLayout, params: Mapping[str, ArrayType]) -> Layout:
    """The rules for a model.

    Args:
      maxtext: How MaxText holds it.
      params: Shapes of pax's parameters.

    Raises:
      ConfigError: MaxText has no array for a parameter.
    """
    if "norms" not in tables.blocks()[maxtext.block]:
        raise ConfigError(f"The weights of decoder_block={maxtext.block} are not supported.", "Start a new run.")
    rules = (
        *(Rule(foreign, pax) for foreign, pax in tables.table("arrays")["outside"].items()),
        *(_rule(foreign, pax) for foreign, pax in tables.table("arrays")["of_layer"].items()),
        Rule("decoder.decoder_norm.scale", "final_norm.scale", shift=maxtext.final_norm_shift),
        *_norm_rules(maxtext),
        *_attention_rules(maxtext, params),
        *_feed_forward_rules(maxtext, params),
    )
    layout = Layout(rules, _maxtext_layers(maxtext), pax_layers(params, maxtext.num_layers)).only(params)
    if left := layout.without_rule(params):
        supported = f"Supported blocks: {', '.join(tables.blocks())}."
        hint = supported if all(name.startswith("stack.") for name in left) else "Switch that off in the recipe."
        raise ConfigError(f"MaxText with decoder_block={maxtext.block} has no array for {listing(left)}.", hint)
    return layout


def _maxtext_layers(maxtext: MaxTextLayout) -> Layers:
    count = len(tables.turns(maxtext.block) or [[]])
    in_blocks = maxtext.num_layers // count * count
    slots = []
    for layer in range(maxtext.num_layers):
        block, within = divmod(layer, count)
        if maxtext.block == "gemma2":
            name, kind = "layers" if maxtext.scanned else f"layers_{block}", ("_local", "_global")[within]
            slots.append(Slot({"layer": name, "kind": kind}, block if maxtext.scanned else None))
        elif not maxtext.scanned:
            slots.append(Slot({"layer": f"layers_{layer}", "kind": ""}))
        elif maxtext.block != "gemma3":
            slots.append(Slot({"layer": "layers", "kind": ""}, layer))
        elif layer < in_blocks:
            slots.append(Slot({"layer": f"layers.layers_{within}", "kind": ""}, block))
        else:
            slots.append(Slot({"layer": f"layers_remainder.layers_{within}", "kind": ""}))
    return Layers(tuple(slots), maxtext.scan_axis)


def _rule(foreign: str, pax: str | tuple[str, ...], *steps: Step, scale: float = 1.0, shift: float = 0.0) -> Rule:
    """A rule for a parameter within a layer."""
    first, dot, rest = foreign.partition(".")
    return layer_rule("decoder", f"{first}{{kind}}{dot}{rest}", pax, *steps, scale=scale, shift=shift)


def _norm_rules(maxtext: MaxTextLayout) -> list[Rule]:
    return [
        _rule(f"{foreign}.{part}", f"{pax}.{part}", shift=maxtext.norm_shift if part == "scale" else 0.0)
        for pax, foreign in zip(_PAX_NORMS, tables.blocks()[maxtext.block]["norms"], strict=False)
        for part in ("scale", "bias")
    ]


def _attention_rules(maxtext: MaxTextLayout, params: Collection[str]) -> list[Rule]:
    rope = (deinterleave(),) if maxtext.adjacent_pairs else ()
    scale, shift = maxtext.query_scale, maxtext.qk_norm_shift
    if maxtext.fused_qkv and scale != 1:
        problem = f"MaxText's query weights are {1 / scale:g} times pax's, and in one array with keys and values."
        needed = "null" if tables.blocks()[maxtext.block].get("scales_queries") else "1.0"
        raise ConfigError(problem, f"Set the recipe's `query_scale` to {needed}.")
    rules = [
        _rule("relative_posemb.rel_embedding", "attention.relative_bias.table", transpose(1, 0)),
        _rule("self_attention.query_norm.scale", "attention.query_norm.scale", *rope, scale=scale, shift=shift),
        _rule("self_attention.key_norm.scale", "attention.key_norm.scale", *rope, shift=shift),
    ]
    weight_scale = 1.0 if _has(params, "attention.query_norm.scale") else scale
    for part, ending in (("kernel", ""), ("bias", "_bias")):
        query, key, value = (f"attention.{name}{ending}" for name in ("query", "key", "value"))
        if maxtext.fused_qkv:
            heads = maxtext.fused_heads
            parts = split(-2, *heads) if heads is not None else unstack(-3)
            steps = (parts, deinterleave(0, 1)) if rope else (parts,)
            rules.append(_rule(f"self_attention.qkv_proj.{part}", (query, key, value), *steps))
        else:
            rules += [
                _rule(f"self_attention.query.{part}", query, *rope, scale=weight_scale),
                _rule(f"self_attention.key.{part}", key, *rope),
                _rule(f"self_attention.value.{part}", value),
            ]
    return rules


def _feed_forward_rules(maxtext: MaxTextLayout, params: Collection[str]) -> list[Rule]:
    if _has(params, "feed_forward.router"):
        foreign = "moe_block" if maxtext.block == "qwen3_moe" else "MoeBlock_0"
        names = {"gate.kernel": "router", "wi_0": "w_gate", "wi_1": "w_in", "wo": "w_out"}
        return [_rule(f"{foreign}.{name}", f"feed_forward.{pax}") for name, pax in names.items()]
    halves = ("feed_forward.w_gate", "feed_forward.w_in")
    wide = [_rule(f"mlp.wi_{i}.kernel", half) for i, half in enumerate(halves)]
    if not _has(params, "feed_forward.w_gate"):
        wide = [_rule("mlp.wi.kernel", "feed_forward.w_in")]
    elif maxtext.fused_mlp:
        wide = [_rule("mlp.wi.kernel", halves, unstack(-2))]
    return [_rule("mlp.wo.kernel", "feed_forward.w_out", transpose(1, 0)), *wide]


def _has(params: Collection[str], within: str) -> bool:
    return any(name.startswith("stack.") and name.endswith(f".{within}") for name in params)
