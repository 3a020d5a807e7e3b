"""Layer normalization."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import NonNegativeFloat, PositiveInt
from paxcli.layers.base import Norm
from paxcli.layers.shared_weights import add_bias, multiply_by_scale


class LayerNorm(Norm):
    """`(x - mean) / sqrt(var + epsilon) * (1 + scale) + bias` (Ba et al., 2016; Pax: `praxis.layers.LayerNorm`).

    By default the scale is initially 0, so that weight decay pulls the norm towards the identity.

    Attributes:
      dims: Size of the last dimension.
      epsilon: Added to the variance.
      use_bias: Whether there is a bias.
      reductions_in_fp32: Whether mean and variance are float32 when the input is narrower (Pax's default: False).
      direct_scale: Whether the parameter is the factor itself, initially 1, instead of the factor less 1.
    """

    dims: PositiveInt
    epsilon: NonNegativeFloat = 1e-6
    use_bias: bool = True
    reductions_in_fp32: bool = True
    direct_scale: bool = False

    def setup(self) -> None:
        init = nn.initializers.ones if self.direct_scale else nn.initializers.zeros
        self.scale = self.weight("scale", init, (self.dims,), ("norm",))
        self.bias = self.zero_weight("bias", (self.dims,), ("norm",)) if self.use_bias else None

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch D"]:
        normed = _standardize(x.astype(jnp.float32) if self.reductions_in_fp32 else x, self.epsilon).astype(x.dtype)
        return add_bias(multiply_by_scale(normed, self.scale if self.direct_scale else 1 + self.scale), self.bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _standardize(x: jax.Array, epsilon: float) -> jax.Array:
    """`(x - mean) / sqrt(var + epsilon)`. Its backward pass needs only the result and one number per row."""
    return _forward(x, epsilon)[0]


def _forward(x: jax.Array, epsilon: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    y = centered * inverse
    return y, (y, inverse)


def _backward(_: float, residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    y, inverse = residuals
    along_y = y * jnp.mean(grad * y, axis=-1, keepdims=True)
    return ((grad - jnp.mean(grad, axis=-1, keepdims=True) - along_y) * inverse,)


_standardize.defvjp(_forward, _backward)
