"""A transformer that reads an image as a sequence of patches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import template
from paxcli.config.fields import Pixels, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.base import Layer
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.linear import Linear
from paxcli.layers.positions import LearnedPositions
from paxcli.layers.stack import Encoder


class VisionTransformer(Layer):
    """Square patches, a projection, learned positions, an encoder, and logits from the mean of all positions.

    Dosovitskiy et al., 2021; the mean in place of a class token: Zhai et al., 2022. Pax: `praxis.layers.vits`.

    Attributes:
      output_dims: Size of the output.
      image_size: Height and width of an image.
      num_channels: Its channels.
      patch_size: Height and width of a patch, a divisor of `image_size`.
      model_dims: D.
      hidden_dims: F.
      num_layers: L.
      num_heads: N, a divisor of D.
      stack: Template of the layers.
      norm: Template of the norm after them.
      params_init: How weights start.
    """

    output_dims: PositiveInt
    image_size: Pixels = 0
    num_channels: PositiveInt = 3
    patch_size: Pixels = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: PositiveInt = 0
    num_heads: PositiveInt = 0
    stack: functools.partial = template(Encoder)
    norm: functools.partial = template(LayerNorm)
    params_init: Init = Xavier()

    def setup(self) -> None:
        if self.image_size % self.patch_size:
            raise ConfigError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}.")
        dims, init = self.model_dims, self.params_init
        length, patch = (self.image_size // self.patch_size) ** 2, self.patch_size**2 * self.num_channels
        self.patches = Linear(input_dims=patch, output_dims=dims, use_bias=True, input_axis=None, params_init=init)
        self.position = LearnedPositions(model_dims=dims, max_seq_len=length)
        self._stack = self.stack(
            name="stack",
            num_layers=self.num_layers,
            model_dims=dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
            dims_per_head=dims // self.num_heads,
            params_init=init,
        )
        self._norm = self.norm(name="norm", dims=dims)
        self.head = Linear(
            input_dims=dims, output_dims=self.output_dims, use_bias=True, output_axis="vocab", params_init=init
        )

    def __call__(self, image: Float[jax.Array, "B height width channels"]) -> Float[jax.Array, "B classes"]:
        expected = (self.image_size, self.image_size, self.num_channels)
        if image.shape[1:] != expected:
            raise ConfigError(
                f"The network reads images of shape {expected}, and the input makes {image.shape[1:]}.",
                "Set image_size and num_channels of network and input alike.",
            )
        x = self.patches(_patches(image, self.patch_size))
        one_segment = jnp.ones(x.shape[:2], jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        x, _ = self._stack(x + self.position(positions), None, one_segment, positions)
        return self.head(jnp.mean(self._norm(x), axis=1))


def _patches(image: jax.Array, size: int) -> jax.Array:
    """[B, height, width, C] to [B, patches, size * size * C], row by row."""
    batch, height, width, channels = image.shape
    grid = image.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(grid, 2, 3).reshape(batch, -1, size * size * channels)
