"""Matmuls of activations and weights in FP8, with delayed scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jaxtyping import Bool, Int

from paxcli.layers.lora import AdaptedWeight, Matrix
from paxcli.layers.matmul import OutputFirst, einsum

Precision = Literal["fp8"]

# Flax's name of the collection of scales and histories: its "gradient" is its new value.
FP8_STATE = fp8_ops.OVERWRITE_WITH_GRADIENT


def product(precision: Precision | None) -> Callable[..., jax.Array]:
    """A function `(equation, activations, weight) -> jnp.einsum(…)`; in FP8 a module, to be named in `setup`.

    The weight is an array, or what `Layer.weight` returns instead.
    """
    return functools.partial(_multiply, einsum) if precision is None else Fp8Product()


def _multiply(einsum: Callable[..., jax.Array], equation: str, x: jax.Array, w: Matrix) -> jax.Array:
    return w.multiply(einsum, equation, x) if isinstance(w, AdaptedWeight | OutputFirst) else einsum(equation, x, w)


class Fp8Product(nn.Fp8Einsum):
    """`jnp.einsum` with E4M3 operands, and E5M2 gradients in the backward pass (Micikevicius et al., 2022).

    Delayed scaling: the scale of each operand follows from its largest absolute values in the last
    `amax_history_length` steps. Without the state, in evaluation and decoding, operands keep their dtype.
    """

    def setup(self) -> None:
        self._scaled = self.is_initializing() or self.has_variable(FP8_STATE, "input_scale")
        if self._scaled:
            super().setup()

    def __call__(self, equation: str, x: jax.Array, w: Matrix) -> jax.Array:  # pyrefly: ignore[bad-override]
        return _multiply(self._in_8_bits, equation, x, w)  # an adapter is small, and keeps the dtype

    def _in_8_bits(self, equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
        if not self._scaled:
            return jnp.einsum(equation, x, w)
        return super().__call__(equation, x, w, preferred_element_type=x.dtype)


def accumulating(state: Any) -> Any:
    """The state in a dtype whose gradients accumulate by maximum: over microbatches, and over scan iterations."""
    return jax.tree.map(_as_maximum, state)


def recomputing_fp8(policy: Callable[..., bool]) -> Callable[..., bool]:
    """A remat policy that saves no FP8 arrays: JAX rounds saved arrays by an operation that does not support E4M3."""

    def is_saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
        is_fp8 = params.get("new_dtype") in (jnp.float8_e4m3fn, jnp.float8_e5m2)
        return not is_fp8 and policy(primitive, *avals, **params)

    return is_saveable


@jax.custom_vjp
def of_round(state: Any, number: Int[jax.Array, ""], in_bubble: Bool[jax.Array, ""]) -> Any:
    """Entry `number` of each array that `accumulating` returned; pipeline bubbles do not change its gradient."""

    def entry(x: jax.Array) -> jax.Array:
        return _as_maximum(jax.lax.dynamic_index_in_dim(_as_float(x), number, 0, keepdims=False))

    return jax.tree.map(entry, state)


def _of_round_forward(state: Any, number: jax.Array, in_bubble: jax.Array) -> tuple[Any, jax.Array]:
    is_mine = jnp.arange(jax.tree.leaves(state)[0].shape[0]) == number
    return of_round(state, number, in_bubble), is_mine & ~in_bubble


def _of_round_backward(is_used: jax.Array, new: Any) -> tuple[Any, None, None]:
    def spread(x: jax.Array) -> jax.Array:
        return _as_maximum(jnp.where(is_used.reshape(-1, *[1] * x.ndim), _as_float(x), -jnp.inf))

    return jax.tree.map(spread, new), None, None


of_round.defvjp(_of_round_forward, _of_round_backward)


def _as_maximum(x: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(x, fp8_ops.fp32_max_grad)


def _as_float(x: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type(x, jnp.float32)
