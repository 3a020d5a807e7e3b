"""Vision transformer (ViT): a transformer encoder over the patches of an image."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import template
from paxcli.config.fields import LayerCount, Pixels, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.base import Layer, flops_of
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.linear import Linear
from paxcli.layers.positions import LearnedPositions
from paxcli.layers.stack import Encoder, Stack, find_stacks


class VisionTransformer(Layer):
    """Square patches, a projection, learned positions, an encoder, and logits from the mean over positions.

    Dosovitskiy et al., 2021; mean pooling instead of a class token: Zhai et al., 2022. Pax: `praxis.layers.vits`.

    Attributes:
      output_dims: Size of the output.
      image_size: Height and width of an image.
      num_channels: Channels of an image.
      patch_size: Height and width of a patch, a divisor of `image_size`.
      model_dims: D.
      hidden_dims: F.
      num_layers: L.
      num_heads: N, a divisor of D.
      stack: Template of the layers.
      norm: Template of the norm after them.
      params_init: Initializer of the weights.
    """

    output_dims: PositiveInt
    image_size: Pixels = 0
    num_channels: PositiveInt = 3
    patch_size: Pixels = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: LayerCount = 0
    num_heads: PositiveInt = 0
    stack: functools.partial = template(Encoder)
    norm: functools.partial = template(LayerNorm)
    params_init: Init = Xavier()

    def setup(self) -> None:
        hint = "Change one of them."
        if self.image_size % self.patch_size:
            raise ConfigError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}.", hint)
        if self.model_dims % self.num_heads:
            raise ConfigError(f"num_heads={self.num_heads} does not divide model_dims={self.model_dims}.", hint)
        self.patches = self._patches_template()
        self.position = LearnedPositions(model_dims=self.model_dims, max_seq_len=self.num_patches)
        self._stack = self._stack_template(name="stack")
        self._norm = self.norm(name="norm", dims=self.model_dims)
        self.head = self._head_template()

    @property
    def num_patches(self) -> int:
        """T, the length of the encoder's sequence."""
        return (self.image_size // self.patch_size) ** 2

    def matmul_flops(self, *shape: int) -> Flops | None:
        batch, layers = shape[0], (self._patches_template, self._stack_template)
        flops = [flops_of(layer(parent=None), batch, self.num_patches) for layer in layers]
        return sum_flops((*flops, flops_of(self._head_template(parent=None), batch)))

    def stacks(self) -> Mapping[str, Stack]:
        return find_stacks(stack=self._stack_template(parent=None))

    @property
    def _patches_template(self) -> functools.partial[Linear]:
        fields = dict(input_dims=self.patch_size**2 * self.num_channels, input_axis=None, params_init=self.params_init)
        return functools.partial(Linear, output_dims=self.model_dims, use_bias=True, **fields)

    @property
    def _stack_template(self) -> functools.partial:
        same = self.named_fields("num_layers", "model_dims", "hidden_dims", "num_heads", "params_init")
        return functools.partial(self.stack, dims_per_head=self.model_dims // self.num_heads, **same)

    @property
    def _head_template(self) -> functools.partial[Linear]:
        fields = self.named_fields("output_dims", "params_init")
        return functools.partial(Linear, input_dims=self.model_dims, use_bias=True, output_axis="vocab", **fields)

    def __call__(self, image: Float[jax.Array, "B height width channels"]) -> Float[jax.Array, "B classes"]:
        expected, found = (self.image_size, self.image_size, self.num_channels), image.shape[1:]
        if found != expected:
            hint = "Set the same `image_size` and `num_channels` for the network and the input."
            raise ConfigError(f"The network reads images of shape {expected}, but the input makes {found}.", hint)
        x = self.patches(_patches(image, self.patch_size))
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        x, _ = self._stack(x + self.position(positions), None, jnp.ones_like(positions), positions)
        return self.head(jnp.mean(self._norm(x), axis=1))


def _patches(image: jax.Array, size: int) -> jax.Array:
    """[B, height, width, C] to [B, patches, size * size * C], row by row."""
    batch, height, width, channels = image.shape
    grid = image.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(grid, 2, 3).reshape(batch, -1, size * size * channels)
