"""Which activations the backward pass keeps, and which it computes again. The same names work scanned and unrolled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

CONTEXT = "context"  # what attention gathers from the values, before its output projection

RematPolicy = Literal[
    "everything",
    "nothing",
    "dots",
    "dots_with_no_batch_dims",
    "context",
    "out_proj",
    "context_and_out_proj",
    "qkv_out_proj",
    "qkv_context_out_proj",
]

_POLICIES: dict[str, Callable[..., Any]] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "context": jax.checkpoint_policies.save_only_these_names(CONTEXT),
    "out_proj": jax.checkpoint_policies.save_only_these_names("out_proj"),
    "context_and_out_proj": jax.checkpoint_policies.save_only_these_names("context", "out_proj"),
    "qkv_out_proj": jax.checkpoint_policies.save_only_these_names("qkv", "out_proj"),
    "qkv_context_out_proj": jax.checkpoint_policies.save_only_these_names("qkv", "context", "out_proj"),
}


def save_as(name: str, x: jax.Array) -> jax.Array:
    """Names an activation, so that a remat policy can keep it."""
    return checkpoint_name(x, name)


def saveable(policy: RematPolicy) -> Callable[..., Any] | None:
    """JAX's predicate for a policy; None for `everything`, which needs no rematerialization."""
    return None if policy == "everything" else _POLICIES[policy]
