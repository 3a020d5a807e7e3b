"""Matmuls of activations and weights that XLA runs at full speed on a CPU, with their gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.mesh.sharding import current_device
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, w)` of activations and a weight. Each dimension is in two or all of the three arrays.

    JAX transposes its matmul for the gradients, whose operands XLA then orders so that on a CPU it transposes the
    larger one and multiplies at half the speed. Here the smaller one comes first for the weight's gradient.

    Without gradients, as in decoding, a few rows are multiplied on a CPU by a weight [outputs, inputs] with the weight
    as the first operand, at twice the speed.
    """
    rows, weight, output = letters(equation)
    produced = "".join(letter for letter in weight if letter in output)
    num_rows = math.prod(size for letter, size in zip(rows, x.shape, strict=True) if letter not in weight)
    if weight.startswith(produced) and num_rows <= _FEW_ROWS and current_device().platform == "cpu":
        return _in_order(f"{weight},{rows}->{output}", w, x)
    return _in_order(equation, x, w)


def _backward(equation: str, operands: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    rows, weight, output = letters(equation)
    x_grad = _in_order(f"{output},{weight}->{rows}", grad, w)
    if x.size <= grad.size:
        w_grad = _in_order(f"{rows},{output}->{weight}", x, grad)
    else:
        w_grad = _in_order(f"{output},{rows}->{weight}", grad, x)
    return x_grad.astype(x.dtype), w_grad.astype(w.dtype)


einsum.defvjp(lambda equation, *operands: (_in_order(equation, *operands), operands), _backward)


def _in_order(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, a, b)`; on a CPU, as one matmul of `a` by `b`, whose result is transposed if need be.

    `jnp.einsum` multiplies `b` by `a` if their dimensions are not in the order of the result, and contracts dimensions
    in the order of the alphabet. XLA then copies the operands, some of them in a slow order on a CPU. For a GPU the
    contracted dimensions take each other's names, so that their order in the alphabet is that in `a`.
    """
    first, second, result = letters(equation)
    contracted = [letter for letter in first if letter in second and letter not in result]
    if (platform := current_device().platform) != "cpu":
        names = str.maketrans("".join(contracted), "".join(sorted(contracted))) if platform == "gpu" else {}
        return jnp.einsum(equation.translate(names), a, b)
    batch = [letter for letter in first if letter in second and letter in result]
    product = "".join(batch + [letter for letter in first + second if letter in result and letter not in batch])
    contracting = _axes(first, contracted), _axes(second, contracted)
    y = jax.lax.dot_general(a, b, (contracting, (_axes(first, batch), _axes(second, batch))))
    if product == result:
        return y
    y = jax.lax.optimization_barrier(y)  # XLA would swap the operands
    return jnp.transpose(y, [product.index(letter) for letter in result])


def _axes(dims: str, chosen: list[str]) -> list[int]:
    return [dims.index(letter) for letter in chosen]
