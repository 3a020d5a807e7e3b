"""Losses of a batch, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int


def cross_entropy(
    logits: Float[jax.Array, "*batch V"], labels: Int[jax.Array, "*batch"]
) -> tuple[Float[jax.Array, "*batch"], Bool[jax.Array, "*batch"]]:
    """`-log softmax(logits)[label]` of each position, in nats, and whether no other token is likelier."""
    logits = logits.astype(jnp.float32)
    below_best = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # A masked sum rather than a gather: its gradient is a fused select, not a scatter.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    label_logit = jnp.sum(jnp.where(is_label, below_best, 0.0), axis=-1)
    return jnp.log(jnp.sum(jnp.exp(below_best), axis=-1)) - label_logit, label_logit == 0


def weighted_mean(values: Float[jax.Array, "*batch"], weights: Float[jax.Array, "*batch"]) -> jax.Array:
    """Sum of weight * value over sum of weights; 0 when all weights are 0 (Pax adds the same 1e-6)."""
    return jnp.sum(values * weights) / (jnp.sum(weights) + 1e-6)
