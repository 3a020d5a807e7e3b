"""Matmuls of activations and weights, with gradients that XLA runs at full speed on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, w)` of activations and a weight. Each dimension is in two of the three arrays.

    JAX transposes its matmul for the weight's gradient, whose operands XLA then orders so that on a CPU it transposes
    the larger one and multiplies at half the speed. Here `x` comes first, and the result needs no transpose.
    """
    return jnp.einsum(equation, x, w)


def _forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(equation, x, w), (x, w)


def _backward(equation: str, operands: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    inputs, output = equation.split("->")
    rows, weight = inputs.split(",")
    x_grad = jnp.einsum(f"{output},{weight}->{rows}", grad, w)
    return x_grad.astype(x.dtype), jnp.einsum(f"{rows},{output}->{weight}", x, grad).astype(w.dtype)


einsum.defvjp(_forward, _backward)
