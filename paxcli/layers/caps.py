"""Soft caps on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, or `x` when `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)
