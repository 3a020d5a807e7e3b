"""Losses of a batch, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.inputs.nested_map import NestedMap

# Metrics of a batch: name -> (mean, weight of the mean), both scalars.
WeightedScalars = dict[str, tuple[jax.Array, jax.Array]]


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


def smoothed(
    xent: Float[jax.Array, "*batch"], logits: Float[jax.Array, "*batch V"], label_smoothing: float
) -> Float[jax.Array, "*batch"]:
    """`xent` if the label had probability `1 - label_smoothing`, and all other tokens shared the rest evenly.

    Szegedy et al., 2016; Pax: `label_smoothing_prob`, which gives the label nothing of what it spreads either.
    """
    others = -jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1) - xent
    return (1 - label_smoothing) * xent + label_smoothing * others / (logits.shape[-1] - 1)


def token_metrics(
    logits: Float[jax.Array, "B T V"],
    labels: Int[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    label_smoothing: float = 0.0,
) -> tuple[WeightedScalars, NestedMap]:
    """Means over tokens: `loss`, `log_pplx` (never smoothed) and `accuracy`; by example, `xent` and `scores`."""
    xent, correct = cross_entropy(logits, labels)
    weight, log_pplx = jnp.sum(weights), weighted_mean(xent, weights)
    loss = weighted_mean(smoothed(xent, logits, label_smoothing), weights) if label_smoothing else log_pplx
    metrics = {
        "loss": (loss, weight),
        "log_pplx": (log_pplx, weight),
        "accuracy": (weighted_mean(correct.astype(jnp.float32), weights), weight),
    }
    return metrics, NestedMap(xent=xent, scores=-jnp.sum(xent * weights, axis=-1))


def weighted_mean(values: Float[jax.Array, "*batch"], weights: Float[jax.Array, "*batch"]) -> jax.Array:
    """Sum of weight * value over sum of weights; 0 when all weights are 0 (Pax adds the same 1e-6)."""
    return jnp.sum(values * weights) / (jnp.sum(weights) + 1e-6)
