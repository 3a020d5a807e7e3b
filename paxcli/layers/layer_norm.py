"""Layer normalization."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.layers.base import Layer


class LayerNorm(Layer):
    """`(x - mean) / sqrt(var + epsilon) * (1 + scale) + bias` (Ba et al., 2016; Pax: `praxis.layers.LayerNorm`).

    The stored scale starts at 0, so that decaying it pulls the norm towards the identity.

    Attributes:
      dims: Size of the last dimension.
      epsilon: Added to the variance.
      use_bias: Whether there is a bias.
      reductions_in_fp32: Whether mean and variance are float32 when the input is narrower. Pax's default is not.
    """

    dims: int
    epsilon: float = 1e-6
    use_bias: bool = True
    reductions_in_fp32: bool = True

    def setup(self) -> None:
        self.scale = self.weight("scale", nn.initializers.zeros, (self.dims,), ("norm",))
        if self.use_bias:
            self.bias = self.weight("bias", nn.initializers.zeros, (self.dims,), ("norm",))

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch D"]:
        wide = x.astype(jnp.float32) if self.reductions_in_fp32 else x
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = (centered * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype) * (1 + self.scale)
        return y + self.bias if self.use_bias else y
