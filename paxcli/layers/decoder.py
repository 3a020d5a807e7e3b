"""Layers that write one sequence while they read another."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.layers.attention.attention import KVCache
from paxcli.layers.attention.cross_attention import CrossAttention
from paxcli.layers.block import TransformerBlock, as_residual
from paxcli.layers.stack import Stack


class DecoderCache(NamedTuple):
    """What a decoder keeps between tokens.

    Attributes:
      own: Keys and values of the tokens written so far.
      source: Keys and values of the sequence that is read; None before the first call, which makes them.
    """

    own: KVCache
    source: KVCache | None = None


class DecoderBlock(TransformerBlock):
    """Causal self-attention, attention to the source, and feed-forward, each behind a norm and beside a residual.

    Pax: `praxis.layers.Transformer` with `use_cross_attention`.

    Attributes:
      cross_attention: Template of the attention to the source. The other fields are those of `TransformerBlock`.
    """

    cross_attention: functools.partial = template(CrossAttention)

    def setup(self) -> None:
        super().setup()
        self.cross_attention_norm = self.norm(dims=self.model_dims)
        self._cross_attention = self.cross_attention(
            name="cross_attention",
            model_dims=self.model_dims,
            num_heads=self.num_heads,
            dims_per_head=self.dims_per_head,
            num_kv_heads=self.num_kv_heads,
            params_init=self.params_init,
            **self._precision_of(self.cross_attention),
        )
        if self.post_norms:
            self.cross_attention_post_norm = self.norm(dims=self.model_dims)

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: Float[jax.Array, "B T D"],
        cache: DecoderCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
        source: Float[jax.Array, "B S D"] | None,
        source_segment_ids: Int[jax.Array, "B S"],
    ) -> tuple[Float[jax.Array, "B T D"], DecoderCache | None]:
        x = as_residual(x)
        attended, own = self._attended(self.attention_norm(x), cache.own if cache else None, segment_ids, segment_pos)
        x = x + attended
        read, keys = self._cross_attention(
            self.cross_attention_norm(x), segment_ids, source, source_segment_ids, cache and cache.source
        )
        x = x + (self.cross_attention_post_norm(read) if self.post_norms else read)
        return x + self._fed_forward(self.feed_forward_norm(x), segment_ids), None if own is None else DecoderCache(
            own, keys
        )


class Decoder(Stack):
    """A stack of such blocks."""

    block: functools.partial = template(DecoderBlock)

    _num_shared = 4

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: Float[jax.Array, "B T D"],
        cache: DecoderCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
        source: Float[jax.Array, "B S D"] | None,
        source_segment_ids: Int[jax.Array, "B S"],
    ) -> tuple[Float[jax.Array, "B T D"], DecoderCache | None]:
        """Runs all layers. The arrays of a cache have a leading `layers` dimension."""
        return self._run(x, cache, segment_ids, segment_pos, source, source_segment_ids)
