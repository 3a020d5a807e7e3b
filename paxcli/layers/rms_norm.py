"""RMSNorm: root-mean-square normalization."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import NonNegativeFloat, PositiveInt
from paxcli.layers.base import Norm
from paxcli.layers.shared_weights import multiply_by_scale


class RmsNorm(Norm):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale)` (Zhang and Sennrich, 2019; Pax: `praxis.layers.RmsNorm`).

    Attributes:
      dims: Size of the last dimension.
      epsilon: Added to the mean square.
      direct_scale: Whether the parameter is the factor itself, initially 1, instead of the factor less 1.
      has_scale: Whether there is a parameter. Without, it is the L2 norm that Llama 4 applies to queries and keys.
    """

    dims: PositiveInt
    epsilon: NonNegativeFloat = 1e-6
    direct_scale: bool = False
    has_scale: bool = True

    def setup(self) -> None:
        init = nn.initializers.ones if self.direct_scale else nn.initializers.zeros
        self.scale = self.weight("scale", init, (self.dims,), ("norm",)) if self.has_scale else None

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype)
        if self.scale is None:
            return normed
        return multiply_by_scale(normed, self.scale if self.direct_scale else 1 + self.scale)
