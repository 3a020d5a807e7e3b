"""Root-mean-square normalization."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.layers.base import Layer


class RmsNorm(Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale)` (Zhang and Sennrich, 2019; Pax: `praxis.layers.RmsNorm`).

    Attributes:
      dims: Size of the last dimension.
      epsilon: Added to the mean square.
    """

    dims: int
    epsilon: float = 1e-6

    def setup(self) -> None:
        self.scale = self.weight("scale", nn.initializers.zeros, (self.dims,), ("norm",))

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype) * (1 + self.scale)
