"""Remat (activation checkpointing): which activations are saved for the backward pass, which are recomputed.

A policy saves matmuls, or activations by their names; `save` and `offload` name more. The same policies work for
scanned and unrolled layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.ad_checkpoint import Recompute, checkpoint_name

from paxcli.errors import ConfigError
from paxcli.mesh.sharding import memory_kinds

_HOST = "pinned_host"

CONTEXT = "context"  # the output of attention before its output projection

Saveable = Callable[..., Any]

_QKV = ("query", "key", "value")
_FEED_FORWARD_IN = ("feed_forward_in", "feed_forward_gate")

_DOTS: dict[str, Saveable] = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_and_context": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_offloaded": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", _HOST),
}
_NAMES: dict[str, tuple[str, ...]] = {
    "dots_with_no_batch_dims_and_context": (CONTEXT,),
    "dots_except_logits": (*_QKV, CONTEXT, "out_proj", *_FEED_FORWARD_IN, "feed_forward_out"),
    "dots_except_logits_and_feed_forward_in": (*_QKV, CONTEXT, "out_proj", "feed_forward_out"),
    "context": (CONTEXT,),
    "out_proj": ("out_proj",),
    "context_and_out_proj": (CONTEXT, "out_proj"),
    "qkv_out_proj": (*_QKV, "out_proj"),
    "qkv_context_out_proj": (*_QKV, CONTEXT, "out_proj"),
}

_Part = Literal["feed_forward_in", "feed_forward_gate", "feed_forward_out"]
Activation = Literal["layer_input", "query", "key", "value", "context", "out_proj", _Part]
_Dots = Literal["dots", "dots_with_no_batch_dims", "dots_with_no_batch_dims_and_context"]
_MoreDots = Literal["dots_with_no_batch_dims_offloaded", "dots_except_logits", "dots_except_logits_and_feed_forward_in"]
_Names = Literal["context", "out_proj", "context_and_out_proj", "qkv_out_proj", "qkv_context_out_proj"]
RematPolicy = Literal["everything", "nothing", _Dots, _MoreDots, _Names]


def save_as(name: str, x: jax.Array) -> jax.Array:
    """Names an activation, so that a remat policy can save it."""
    return checkpoint_name(x, name)


def saveable(policy: RematPolicy, offload: Sequence[str] = (), save: Sequence[str] = ()) -> Saveable | None:
    """JAX's checkpoint policy; None for `everything`, which needs no remat.

    Args:
      policy: Which activations are saved.
      offload: Activations saved besides, in pinned host memory.
      save: Activations saved besides, in device memory.

    Raises:
      ConfigError: Activations are offloaded, but these devices have no pinned host memory; or the three contradict.
    """
    if (offload or policy.endswith("_offloaded")) and _HOST not in memory_kinds():
        field = f"offload={list(offload)}" if offload else f"remat_policy={policy}"
        hint = "Set `offload` to [], and a policy that recomputes them, such as `nothing`."
        raise ConfigError(f"{field} saves activations in pinned host memory, which these devices do not have.", hint)
    if both := [name for name in save if name in offload]:
        raise ConfigError(f"`save` and `offload` both name {', '.join(both)}.", "Leave each in one of them.")
    if policy == "everything":
        if offload or save:
            hint = "Choose another policy, or set `save` and `offload` to []."
            raise ConfigError("remat_policy=everything leaves nothing to offload or save.", hint)
        return None
    on_device = {*save, *_NAMES.get(policy, ())} - {*offload}
    names = dict(names_which_can_be_saved=sorted(on_device), names_which_can_be_offloaded=list(offload))
    to_host = dict(offload_src="device", offload_dst=_HOST)
    by_name = jax.checkpoint_policies.save_and_offload_only_these_names(**names, **to_host)
    dots = _DOTS.get(policy, jax.checkpoint_policies.nothing_saveable)

    def decide(primitive: Any, *args: Any, **params: Any) -> Any:
        # cuDNN's attention has no named output.
        if CONTEXT in on_device and primitive.name.startswith("dot_product_attention_fwd"):
            return True
        decision = by_name(primitive, *args, **params)
        return dots(primitive, *args, **params) if decision is Recompute else decision

    return decide
