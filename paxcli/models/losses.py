"""Losses and token metrics, computed in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.mesh.sharding import current_device, split
from paxcli.nested_map import NestedMap

# Metrics of a batch: name -> (mean, weight of the mean), both scalars.
WeightedScalars = dict[str, tuple[jax.Array, jax.Array]]

_ROUNDING = 1e-6  # XLA may compute a logit twice, with different rounding


def cross_entropy(
    logits: Float[jax.Array, "*batch V"], labels: Int[jax.Array, "*batch"]
) -> tuple[Float[jax.Array, "*batch"], Bool[jax.Array, "*batch"]]:
    """`-log softmax(logits)[label]` of each position, in nats, and whether the label is the most likely token.

    Of equal logits the first counts as the largest, as for `argmax`: in bfloat16 there are many.
    """
    wide = jax.lax.stop_gradient(logits).astype(jnp.float32)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    is_largest = wide >= largest - _ROUNDING * jnp.abs(largest)
    index = jnp.arange(logits.shape[-1], dtype=jnp.float32)  # XLA fuses reductions of one dtype
    first = jnp.min(jnp.where(is_largest, index, jnp.inf), axis=-1)
    return _xent(logits, labels), first == labels


@jax.custom_jvp
def _xent(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(wide - largest), axis=-1)) + (largest - _label_logit(logits, labels))[..., 0]


@_xent.defjvp
def _xent_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    logits, labels = primals
    xent = _xent(logits, labels)
    shares = jnp.exp(logits.astype(jnp.float32) - _label_logit(logits, labels) - xent[..., None])
    slope = shares - jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    return xent, jnp.sum(slope * tangents[0].astype(jnp.float32), axis=-1)


def _label_logit(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The label's logit [*batch, 1] in float32."""
    # Of a sharded vocabulary, a gather could move all logits; a TPU gathers one element at a time.
    if split(logits.shape, *(None,) * labels.ndim, "activation_vocab")[-1] > 1 or current_device().platform == "tpu":
        is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
        return jnp.sum(jnp.where(is_label, logits, 0), axis=-1, keepdims=True, dtype=jnp.float32)
    return jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip").astype(jnp.float32)


def token_losses(
    logits: Float[jax.Array, "*batch V"],
    labels: Int[jax.Array, "*batch"],
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> tuple[Float[jax.Array, "*batch"], Float[jax.Array, "*batch"], Bool[jax.Array, "*batch"]]:
    """For each token its loss, its cross-entropy alone, and whether it is the most likely one.

    Args:
      logits: Logits.
      labels: Target token ids.
      label_smoothing: Probability that the loss spreads evenly over all other tokens (Szegedy et al., 2016; Pax:
        `label_smoothing_prob`, likewise).
      z_loss_weight: Weight of the z-loss, the squared log-partition function, which keeps logits near 0 (Chowdhery et
        al., 2022, section 5; Pax: `z_loss_weight`).
    """
    xent, correct = cross_entropy(logits, labels)
    loss = xent
    if label_smoothing:
        others = -jnp.sum(jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1) - xent
        loss = (1 - label_smoothing) * xent + label_smoothing * others / (logits.shape[-1] - 1)
    if z_loss_weight:
        loss = loss + z_loss_weight * jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
    return loss, xent, correct


def token_metrics(
    logits: Float[jax.Array, "B T V"],
    labels: Int[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
) -> tuple[WeightedScalars, NestedMap]:
    """Means over tokens: `loss`, `log_pplx` (cross-entropy alone), `accuracy`; per example, arrays about its tokens.

    With label smoothing also `log_pplx_smoothed`, the cross-entropy with smoothed labels, which Pax calls `log_pplx`;
    not beside a z-loss, where it is not known.
    """
    loss, xent, correct = token_losses(logits, labels, label_smoothing, z_loss_weight)
    return means_over_tokens(weighted_mean(loss, weights), xent, correct, weights, label_smoothing, z_loss_weight)


def means_over_tokens(
    loss: jax.Array,
    xent: Float[jax.Array, "B T"],
    correct: Bool[jax.Array, "B T"],
    weights: Float[jax.Array, "B T"],
    label_smoothing: float,
    z_loss_weight: float,
) -> tuple[WeightedScalars, NestedMap]:
    """What `token_metrics` returns, from a mean loss.

    Args:
      loss: The mean loss.
      xent: Cross-entropy of each token.
      correct: Whether the target is the most likely token.
      weights: Weight of each token.
      label_smoothing: That of the loss, as in `token_losses`.
      z_loss_weight: Likewise.
    """
    weight = jnp.sum(weights)
    metrics = {
        "loss": (loss, weight),
        "log_pplx": (weighted_mean(xent, weights) if label_smoothing or z_loss_weight else loss, weight),
        "accuracy": (weighted_mean(correct.astype(jnp.float32), weights), weight),
    }
    if label_smoothing and not z_loss_weight:
        metrics["log_pplx_smoothed"] = (loss, weight)
    return metrics, NestedMap(xent=xent, correct=correct, weights=weights, scores=-jnp.sum(xent * weights, axis=-1))


def weighted_mean(values: Float[jax.Array, "*batch"], weights: Float[jax.Array, "*batch"]) -> jax.Array:
    """Sum of weight * value over sum of weights; 0 when all weights are 0 (Pax adds the same 1e-6)."""
    return jnp.sum(values * weights) / (jnp.sum(weights) + 1e-6)
