"""One layer of a transformer."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.layers.attention import Attention, KVCache
from paxcli.layers.base import Layer
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm


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
      zero_padding: Whether the feed-forward adds nothing at padding (segment 0), as in Pax. Its values reach no token.
      params_init: How weights start.
    """

    model_dims: int
    hidden_dims: int
    num_heads: int
    dims_per_head: int
    num_kv_heads: int | None = None
    norm: functools.partial = template(LayerNorm)
    attention: functools.partial = template(Attention)
    feed_forward: functools.partial = template(FeedForward)
    zero_padding: bool = False
    params_init: Init = Xavier()

    def setup(self) -> None:
        self.attention_norm = self.norm(dims=self.model_dims)
        self._attention = self.attention(
            name="attention",
            model_dims=self.model_dims,
            num_heads=self.num_heads,
            dims_per_head=self.dims_per_head,
            num_kv_heads=self.num_kv_heads,
            params_init=self.params_init,
        )
        self.feed_forward_norm = self.norm(dims=self.model_dims)
        self._feed_forward = self.feed_forward(
            name="feed_forward", model_dims=self.model_dims, hidden_dims=self.hidden_dims, params_init=self.params_init
        )

    def __call__(
        self,
        x: Float[jax.Array, "B T D"],
        cache: KVCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        attended, cache = self._attention(self.attention_norm(x), segment_ids, segment_pos, cache)
        x = x + attended
        return x + self._fed_forward(x, segment_ids), cache

    def _fed_forward(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        y = self._feed_forward(self.feed_forward_norm(x))
        return y * (segment_ids != 0)[..., None].astype(y.dtype) if self.zero_padding else y
