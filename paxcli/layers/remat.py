"""Remat (activation checkpointing): which activations are saved for the backward pass, which are recomputed.

The same policies work for scanned and unrolled layers.
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


def _is_cudnn_context(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether this is cuDNN's attention, which has no named outputs."""
    return primitive.name.startswith("dot_product_attention_fwd")


def _save_names(*names: str) -> Saveable:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    if CONTEXT in names:
        return jax.checkpoint_policies.save_from_both_policies(policy, _is_cudnn_context)
    return policy


_NO_BATCH_DIMS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_POLICIES: dict[str, Saveable] = {  # all but `everything`
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": _NO_BATCH_DIMS,
    "dots_with_no_batch_dims_and_context": jax.checkpoint_policies.save_from_both_policies(
        _NO_BATCH_DIMS, _save_names(CONTEXT)
    ),
    "dots_with_no_batch_dims_offloaded": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", _HOST),
    "dots_except_logits": _save_names(*_QKV, CONTEXT, "out_proj", *_FEED_FORWARD_IN, "feed_forward_out"),
    "dots_except_logits_and_feed_forward_in": _save_names(*_QKV, CONTEXT, "out_proj", "feed_forward_out"),
    "context": _save_names(CONTEXT),
    "out_proj": _save_names("out_proj"),
    "context_and_out_proj": _save_names(CONTEXT, "out_proj"),
    "qkv_out_proj": _save_names(*_QKV, "out_proj"),
    "qkv_context_out_proj": _save_names(*_QKV, CONTEXT, "out_proj"),
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


def saveable(policy: RematPolicy, offload: Sequence[Activation] = ()) -> Saveable | None:
    """JAX's checkpoint policy; None for `everything`, which needs no remat.

    Args:
      policy: Which activations are saved.
      offload: Activations saved besides, in pinned host memory.

    Raises:
      ConfigError: Activations are offloaded, but these devices have no pinned host memory.
    """
    if (offload or policy.endswith("_offloaded")) and _HOST not in memory_kinds():
        raise ConfigError(
            f"{f'offload={list(offload)}' if offload else f'remat_policy={policy}'} saves activations in pinned host "
            "memory, which these devices do not have.",
            "Set `offload` to [], and a policy that recomputes them, such as `nothing`.",
        )
    if policy == "everything":
        if offload:
            hint = "Choose another policy, or set `offload` to []."
            raise ConfigError("remat_policy=everything leaves nothing to offload.", hint)
        return None
    saved = _POLICIES[policy]
    if not offload:
        return saved
    offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=offload, offload_src="device", offload_dst=_HOST
    )

    def decide(*args: Any, **params: Any) -> Any:
        decision = offloaded(*args, **params)
        return saved(*args, **params) if decision is Recompute else decision

    return decide
