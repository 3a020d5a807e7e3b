"""Weights that many tokens share (rows of a table, biases, scales), with gradients that keep the small parts of a sum.

In bfloat16 a sum no longer grows once it is 256 times its parts: 5,000 equal gradients of a frequent token come to a
fifth of their sum, 65,536 of a bias to an eighth. Gradients are summed in float32; on GPUs, additions in bfloat16 also
take several times as long. On TPUs, as in Pax, the sum has the dtype of the weight: there, float32 for a vocabulary of
256,000 would take gigabytes of each chip.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.mesh.sharding import current_device


@jax.custom_gradient
def look_up(table: Float[jax.Array, "V D"], ids: Int[jax.Array, "... T"]) -> Any:
    """`jnp.take(table, ids, axis=0)`: [..., T, D]."""

    def gradients(grad: jax.Array) -> tuple[jax.Array, None]:
        zeros = jnp.zeros(table.shape, _dtype_of_sums(table))  # as wide as `grad`, or wider
        return zeros.at[ids].add(grad).astype(table.dtype), None

    return jnp.take(table, ids, axis=0), gradients


@jax.custom_gradient
def add_bias(x: jax.Array, bias: jax.Array | None) -> Any:
    """`x + bias`, the same for each row of `x`; None = no bias."""
    y = x if bias is None else x + bias
    return y, lambda grad: (grad.astype(x.dtype), None if bias is None else _sum_over_rows(grad, bias))


@jax.custom_gradient
def multiply_by_scale(x: jax.Array, scale: jax.Array) -> Any:
    """`x * scale`, the same for each row of `x`."""
    return x * scale, lambda grad: ((grad * scale).astype(x.dtype), _sum_over_rows(grad * x, scale))


def _sum_over_rows(grads: jax.Array, weight: jax.Array) -> jax.Array:
    rows = tuple(range(grads.ndim - weight.ndim))
    return jax.lax.reduce_sum(grads.astype(_dtype_of_sums(weight)), rows).astype(weight.dtype)


def _dtype_of_sums(weight: jax.Array) -> Any:
    return weight.dtype if current_device().platform == "tpu" else jnp.float32
