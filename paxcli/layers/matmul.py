"""Matmuls of activations and weights that XLA runs at full speed on a CPU, with their gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.mesh.weights import Weight

_FEW_ROWS = 64


def letters(equation: str) -> tuple[str, str, str]:
    """The letters of the activations, the weight and the result in an einsum equation."""
    operands, result = equation.split("->")
    rows, weight = operands.split(",")
    return rows, weight, result


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=("order",))
@dataclasses.dataclass(frozen=True)
class OutputFirst:
    """A weight stored as [outputs, inputs], whatever the order of its dimensions.

    Attributes:
      parts: The stored array, or several arrays, which hold parts of the outputs.
      order: The dimension of the weight that each of their dimensions is.
    """

    parts: tuple[Any, ...]  # in trees of other things, such as shardings, one of those
    order: tuple[int, ...]

    def multiply(self, einsum: Callable[..., jax.Array], equation: str, x: jax.Array) -> jax.Array:
        """`einsum(equation, x, weight)`."""
        rows, weight, result = letters(equation)
        stored = "".join(weight[dim] for dim in self.order)
        products = [einsum(f"{rows},{stored}->{result}", x, part) for part in self.parts]
        return jnp.concatenate(products, axis=result.index(stored[0]))


def output_first(w: jax.Array, facts: Weight, num_parts: int = 1) -> jax.Array | OutputFirst:
    """The weight as `OutputFirst`, if its layer takes it so and it does not stack several layers.

    With `num_parts`, its outputs are divided into as many arrays. XLA divides a matmul of few rows badly among the
    threads of a CPU, and runs several faster at once. The weights before the hidden units of a feed-forward layer are
    not divided: with a gate, there are two already.
    """
    if facts.num_stacked or not facts.any_order:
        return w
    order = (*facts.produces, *facts.contracts)
    stored = jnp.transpose(w, order)
    if facts.axes[order[0]] == "mlp" or len(stored) % num_parts:
        num_parts = 1
    return OutputFirst(tuple(jnp.split(stored, num_parts)), order)


def multiply(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, w)`, with the weight as the first operand where that is faster.

    On a CPU, a few rows, as in decoding, are multiplied by a weight [outputs, inputs] at twice the speed.
    """
    rows, weight, output = letters(equation)
    produced = "".join(letter for letter in weight if letter in output)
    num_rows = math.prod(size for letter, size in zip(rows, x.shape, strict=True) if letter not in weight)
    if not weight.startswith(produced) or num_rows > _FEW_ROWS:
        return jnp.einsum(equation, x, w)

    def weight_first(x: jax.Array, w: jax.Array) -> jax.Array:
        swapped = produced + "".join(letter for letter in rows if letter in output and letter not in produced)
        y = jnp.einsum(f"{weight},{rows}->{swapped}", w, x)
        return jnp.einsum(f"{swapped}->{output}", jax.lax.optimization_barrier(y))  # XLA would swap the operands back

    return jax.lax.platform_dependent(x, w, cpu=weight_first, default=functools.partial(jnp.einsum, equation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, w)` of activations and a weight. Each dimension is in two or all of the three arrays.

    JAX transposes its matmul for the weight's gradient, whose operands XLA then orders so that on a CPU it transposes
    the larger one and multiplies at half the speed. Here `x` comes first, and the result needs no transpose.
    """
    return multiply(equation, x, w)


def _forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(equation, x, w), (x, w)


def _backward(equation: str, operands: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    rows, weight, output = letters(equation)
    x_grad = jnp.einsum(f"{output},{weight}->{rows}", grad, w)
    return x_grad.astype(x.dtype), jnp.einsum(f"{rows},{output}->{weight}", x, grad).astype(w.dtype)


einsum.defvjp(_forward, _backward)
