"""Functions of activations: nonlinearities by name, the soft cap of logits, and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.mesh.sharding import current_device

ActivationName = Literal[
    "gelu", "gelu_exact", "relu", "squared_relu", "silu", "clamped_silu", "tanh", "sigmoid", "identity"
]

_CLAMP = 7.0  # of gpt-oss, and the factor in its sigmoid
_SLOPE = 1.702


def identity(x: jax.Array) -> jax.Array:
    """In place of a norm, an activation or dropout that a layer does not have."""
    return x


_GELU_RATE = math.sqrt(8 / math.pi)
_GELU_CUBIC = 0.044715


@jax.custom_gradient
def _gelu(x: jax.Array) -> Any:
    """The tanh approximation, as in GPT-2 and Pax. For the backward pass it saves its slope, not three arrays.

    GELU and its slope share one sigmoid: with a tanh for GELU, XLA would compute both.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    share = jax.nn.sigmoid(_GELU_RATE * (wide + _GELU_CUBIC * wide**3))  # GELU is `x * share`
    slope = (share + wide * share * (1 - share) * _GELU_RATE * (1 + 3 * _GELU_CUBIC * wide**2)).astype(x.dtype)
    y = (wide * share).astype(x.dtype)
    if current_device().platform == "gpu":  # in the form that XLA fuses into the matmul before it, in cuBLAS
        y = x * (0.5 * (1 + jnp.tanh(_GELU_RATE / 2 * (x + _GELU_CUBIC * (x * (x * x))))))
    return y, lambda grad: slope * grad


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "clamped_silu": lambda x: jnp.minimum(x, _CLAMP) * jax.nn.sigmoid(_SLOPE * jnp.minimum(x, _CLAMP)),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "identity": identity,
}


def activation(name: ActivationName) -> Callable[[jax.Array], jax.Array]:
    """The elementwise function called `name`."""
    return _ACTIVATIONS[name]


def gate(name: ActivationName, gate: jax.Array, x: jax.Array) -> jax.Array:
    """`act(gate) * x`, as in SwiGLU; gated by `clamped_silu`, `x` is clamped too, and increased by 1 (gpt-oss)."""
    return activation(name)(gate) * (jnp.clip(x, -_CLAMP, _CLAMP) + 1 if name == "clamped_silu" else x)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, or `x` when `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def dropout(layer: nn.Module, rate: float) -> Callable[[jax.Array], jax.Array]:
    """Dropout (Srivastava et al., 2014) in training; `identity` in evaluation, and with rate 0.

    Each call drops other elements, whatever the sharding, and divides those that it keeps by `1 - rate`.

    Args:
      layer: The layer that calls it, for its random keys.
      rate: Share of the elements that are dropped, below 1.
    """

    def drop(x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(layer.make_rng("dropout"), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0)

    return drop if rate and layer.has_rng("dropout") else identity
