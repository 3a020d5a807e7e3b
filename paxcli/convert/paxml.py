"""Maps paxml's parameters to pax's, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from paxcli.checkpoint.reading import listing, named_leaves, nest_by_name
from paxcli.convert.layout import Layers, Layout, Rule, Slot, Step, from_pax, to_pax, transpose, unstack
from paxcli.errors import DataError

PaxmlLayers = Literal["repeat", "unrolled", "pipeline"]
Arrays = dict[str, np.ndarray]

_QKV = ("query", "key", "value")


def _layer_rule(foreign: str, pax: str | tuple[str, ...], *steps: Step) -> Rule:
    names = (pax,) if isinstance(pax, str) else pax
    return Rule(f"transformer/{{layer}}/{foreign}", tuple(f"stack.{{layer}}.{name}" for name in names), steps)


_RULES = (
    Rule("softmax/logits_ffn/linear/w", "embedding.table", (transpose(1, 0),)),  # [D, V] -> [V, D]
    Rule("softmax/logits_ffn/bias/b", "embedding.bias"),
    Rule("position_emb/emb_var", "position.table"),
    Rule("final_ln/scale", "final_norm.scale"),
    Rule("final_ln/bias", "final_norm.bias"),
    _layer_rule("layer_norm/scale", "attention_norm.scale"),
    _layer_rule("layer_norm/bias", "attention_norm.bias"),
    _layer_rule("self_attention/combined_qkv/w", tuple(f"attention.{x}" for x in _QKV), unstack(0)),
    _layer_rule("self_attention/combined_qkv/b", tuple(f"attention.{x}_bias" for x in _QKV), unstack(0)),
    _layer_rule("self_attention/post/w", "attention.post", transpose(1, 2, 0)),  # [D, N, H] -> [N, H, D]
    _layer_rule("self_attention/post/b", "attention.post_bias"),
    _layer_rule("self_attention/per_dim_scale/per_dim_scale", "attention.per_dim_scale"),
    _layer_rule("ff_layer/layer_norm/scale", "feed_forward_norm.scale"),
    _layer_rule("ff_layer/layer_norm/bias", "feed_forward_norm.bias"),
    _layer_rule("ff_layer/ffn_layer1/linear/w", "feed_forward.w_in"),
    _layer_rule("ff_layer/ffn_layer1/bias/b", "feed_forward.b_in"),
    _layer_rule("ff_layer/ffn_layer2/linear/w", "feed_forward.w_out", transpose(1, 0)),  # [F, D] -> [D, F]
    _layer_rule("ff_layer/ffn_layer2/bias/b", "feed_forward.b_out"),
)
_IN_LAYER = re.compile(r"transformer/(repeat/sub/|pipeline/body/)?x_layers_(\d+)/(.+)")


def from_paxml(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Pax's parameters as a tree, layers stacked, from `{paxml's name: array}`.

    Names may begin with `params/`. Repeated layers have a leading dimension of layers; pipelined ones of stages, or of
    repeats and stages; unrolled ones a number in their name.

    Raises:
      DataError: A name that is not a parameter of one of Pax's language models.
    """
    foreign = {name.removeprefix("params/").removeprefix("lm/"): array for name, array in arrays.items()}
    in_layers = [match for name in foreign if (match := _IN_LAYER.fullmatch(name))]
    prefix = next((match[1] or "" for match in in_layers), "")
    dims = next((foreign[match[0]].shape[:-1] for match in in_layers if match[3] == "layer_norm/scale"), ())
    layers = _paxml_layers(prefix, len({match[2] for match in in_layers}), dims)
    layout = Layout(_RULES, layers, Layers.of_one_stack(len(layers.slots))).only(foreign, "foreign")
    unknown = layout.without_rule(foreign, "foreign")
    if unknown:
        raise DataError(f"Not parameters of one of Pax's language models: {listing(unknown)}.")
    return nest_by_name(dict(to_pax(layout, foreign)))


def to_paxml(
    params: Mapping[str, Any], layers: PaxmlLayers = "repeat", num_stages: int = 1, repeats: int = 1
) -> Arrays:
    """The inverse of `from_paxml`, for stacked parameters.

    Args:
      params: Pax's parameters as a tree, layers stacked.
      layers: How paxml's run held its layers.
      num_stages: Of a pipeline.
      repeats: Of a circular pipeline; with more than 1, arrays have a dimension for them.
    """
    pax = {name: np.asarray(leaf) for name, leaf in named_leaves(dict(params)).items()}
    count = len(pax["stack.layers.attention_norm.scale"])
    if layers == "unrolled":
        foreign = _paxml_layers("", count, ())
    elif layers == "repeat":
        foreign = _paxml_layers("repeat/sub/", 1, (count,))
    else:
        dims = (repeats, num_stages) if repeats > 1 else (num_stages,)
        foreign = _paxml_layers("pipeline/body/", count // math.prod(dims), dims)
    layout = Layout(_RULES, foreign, Layers.of_one_stack(count)).only(pax)
    return {f"lm/{name}": array for name, array in from_pax(layout, pax)}


def _paxml_layers(prefix: str, num_names: int, dims: tuple[int, ...]) -> Layers:
    """Layers by paxml's numbers in names and leading dimensions: those of one stage before those of the next."""
    numbers = range(num_names * math.prod(dims))
    slots = (Slot({"layer": f"{prefix}x_layers_{n % num_names}"}, n // num_names if dims else None) for n in numbers)
    return Layers(tuple(slots), dims=dims)
