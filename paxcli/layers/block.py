"""One layer of a transformer."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.config.fields import PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import Attention, KVCache
from paxcli.layers.base import Layer
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.fp8 import Precision
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.remat import save_as
from paxcli.layers.scopes import ATTENTION
from paxcli.mesh.sharding import constrain, layout

_ROWS = ("activation_batch", "activation_length")
_RESIDUAL, _FACTOR = (*_ROWS, "activation_residual"), (*_ROWS, "activation_embed")


class TransformerBlock(Layer):
    """Attention and feed-forward, each behind a norm and beside a residual (Pax: `Transformer`, pre-norm).

    Any layer with this signature can take its place in a stack.

    Attributes:
      model_dims: D.
      hidden_dims: F.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K; None = N.
      norm: Template of the two norms.
      attention: Template of the attention.
      feed_forward: Template of the feed-forward layer.
      post_norms: Whether what is added to a residual passes a norm first (Ding et al., 2021: "sandwich").
      zero_padding: Whether the feed-forward adds nothing at padding (segment 0), as in Pax. Its values reach no token.
      precision: `fp8` multiplies activations by weights in 8 bits, in training; None = in the activations' type.
      params_init: How weights start.
    """

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    norm: functools.partial = template(LayerNorm)
    attention: functools.partial = template(Attention)
    feed_forward: functools.partial = template(FeedForward)
    post_norms: bool = False
    zero_padding: bool = False
    precision: Precision | None = None
    params_init: Init = Xavier()

    def setup(self) -> None:
        self.attention_norm = self.norm(dims=self.model_dims)
        self._attention = self.attention(
            name=ATTENTION,
            model_dims=self.model_dims,
            num_heads=self.num_heads,
            dims_per_head=self.dims_per_head,
            num_kv_heads=self.num_kv_heads,
            params_init=self.params_init,
            **self._precision_of(self.attention),
        )
        self.feed_forward_norm = self.norm(dims=self.model_dims)
        self._feed_forward = self.feed_forward(
            name="feed_forward",
            model_dims=self.model_dims,
            hidden_dims=self.hidden_dims,
            params_init=self.params_init,
            **self._precision_of(self.feed_forward),
        )
        if self.post_norms:
            self.attention_post_norm = self.norm(dims=self.model_dims)
            self.feed_forward_post_norm = self.norm(dims=self.model_dims)

    def __call__(
        self,
        x: Float[jax.Array, "B T D"],
        cache: KVCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        x = as_residual(x)
        attended, cache = self._attended(self.attention_norm(x), cache, segment_ids, segment_pos)
        x = x + attended
        return x + self._fed_forward(self.feed_forward_norm(x), segment_ids), cache

    def _precision_of(self, part: functools.partial) -> dict[str, Any]:
        """What a part of the layer is told of `precision`."""
        if self.precision is None:
            return {}
        if not hasattr(part.func, "precision"):
            raise ConfigError(f"{part.func.__name__} does not compute in {self.precision}.", "Set `precision` to null.")
        return {"precision": self.precision}

    def _attended(
        self, x: jax.Array, cache: KVCache | None, segment_ids: jax.Array, segment_pos: jax.Array
    ) -> tuple[jax.Array, KVCache | None]:
        """What attention adds to the residual, given the normed `x`."""
        y, cache = self._attention(as_factor(x), segment_ids, segment_pos, cache)
        return self.attention_post_norm(y) if self.post_norms else y, cache

    def _fed_forward(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """What the feed-forward adds."""
        y = self._feed_forward(as_factor(x))
        y = self.feed_forward_post_norm(y) if self.post_norms else y
        return y * (segment_ids != 0)[..., None].astype(y.dtype) if self.zero_padding else y


class ParallelBlock(TransformerBlock):
    """`x + attention(norm(x)) + feed_forward(norm(x))`, with one norm for both (Chowdhery et al., 2022, section 2).

    Its fields are those of `TransformerBlock`. Flax makes no `feed_forward_norm`, since nothing calls it.
    """

    def __call__(
        self,
        x: Float[jax.Array, "B T D"],
        cache: KVCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        x = as_residual(x)
        normed = self.attention_norm(x)
        attended, cache = self._attended(normed, cache, segment_ids, segment_pos)
        return x + attended + self._fed_forward(normed, segment_ids), cache


class EncoderBlock(TransformerBlock):
    """A block whose positions see all of their segment (Devlin et al., 2019; Pax: `mask_self_attention=False`)."""

    attention: functools.partial = template(Attention, causal=False)


def as_residual(x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
    """`x` as it is kept between layers, under its name for remat."""
    return save_as("layer_input", constrain(x, *_RESIDUAL) if _differ(x) else x)


def as_factor(x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
    """`x` as a product with weights takes it."""
    return constrain(x, *_FACTOR) if _differ(x) else x


def _differ(x: jax.Array) -> bool:
    return layout(x.shape, *_RESIDUAL) != layout(x.shape, *_FACTOR)
