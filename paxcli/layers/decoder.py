"""The decoder of an encoder-decoder: causal self-attention, cross-attention to the source, and feed-forward."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jaxtyping import Float

from paxcli.config.configurable import template
from paxcli.layers.activations import dropout, identity
from paxcli.layers.attention.cross_attention import CrossAttention
from paxcli.layers.base import Cache, HiddenStates, Ids, SourceIds, flops_of
from paxcli.layers.block import TransformerBlock, as_matmul_input, as_residual
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.stack import Stack
from paxcli.layers.summaries import report_activation


class DecoderCache(NamedTuple):
    """The decode cache of a decoder block.

    Attributes:
      own: The cache of its self-attention.
      source: Keys and values of the source; None before the first call, which computes them.
    """

    own: Cache
    source: Cache = None


class DecoderBlock(TransformerBlock):
    """Pre-norm block of causal self-attention, cross-attention to the source, and feed-forward, each with a residual.

    Pax: `praxis.layers.Transformer` with `use_cross_attention`.

    Attributes:
      cross_attention: Template of the cross-attention. The other fields are those of `TransformerBlock`.
    """

    cross_attention: functools.partial = template(CrossAttention)

    def setup(self) -> None:
        super().setup()
        self.cross_attention_norm = self.norm(dims=self.model_dims)
        self._cross_attention = self._cross_attention_template(name="cross_attention")
        self.cross_attention_post_norm = self.norm(dims=self.model_dims) if self.post_norms is True else identity

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: HiddenStates,
        cache: DecoderCache | None,
        segment_ids: Ids,
        segment_pos: Ids,
        source: Float[jax.Array, "B S D"] | None,
        source_segment_ids: SourceIds,
    ) -> tuple[HiddenStates, DecoderCache | None]:
        x = as_residual(x)
        report_activation(self, x, segment_ids)
        own, keys = cache or (None, None)
        attended, own = self._attend(self.attention_norm(x), own, segment_ids, segment_pos)
        x = x + attended
        normed = as_matmul_input(self.cross_attention_norm(x))
        read, keys = self._cross_attention(normed, segment_ids, source, source_segment_ids, keys)
        x = x + dropout(self, self.residual_dropout_prob)(self.cross_attention_post_norm(read))
        return x + self._feed(self.feed_forward_norm(x), segment_ids), None if own is None else DecoderCache(own, keys)

    def matmul_flops(self, *shape: int) -> Flops | None:
        batch, length, _ = shape
        own, cross = super().matmul_flops(batch, length), flops_of(self._cross_attention_template(parent=None), *shape)
        return sum_flops((own, cross))

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> DecoderCache:
        return DecoderCache(super().init_cache(batch_size, length, dtype))

    @property
    def _cross_attention_template(self) -> functools.partial:
        return functools.partial(self._with_precision(self.cross_attention), **self._attention_widths)


class Decoder(Stack):
    """A stack of `DecoderBlock`."""

    block: functools.partial = template(DecoderBlock)

    _num_broadcast = 4  # the encoded source and its segment ids too
