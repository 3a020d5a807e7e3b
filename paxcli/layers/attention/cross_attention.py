"""Attention from one sequence to another."""

from __future__ import annotations

import jax
from jaxtyping import Float, Int

from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import Attention, KVCache, dot_product_attention, laid_out


class CrossAttention(Attention):
    """Multi-head attention whose keys and values come from a source sequence (Vaswani et al., 2017, section 3.2.3).

    Pax: the `cross_attention` of `praxis.layers.Transformer`. The fields are those of `Attention`, except that there is
    no order between the two sequences: `causal` stays False, `rotary`, `window` and `relative_bias` None.
    """

    causal: bool = False

    def setup(self) -> None:
        if self.causal or self.rotary is not None or self.relative_bias is not None:
            raise ConfigError(
                "Cross-attention knows no order of positions.",
                "Leave `causal` False, `rotary` and `relative_bias` None.",
            )
        if self.kernel not in ("auto", "xla"):
            raise ConfigError(f"Cross-attention has no kernel `{self.kernel}`.", "Set `kernel` to `auto` or `xla`.")
        super().setup()

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: Float[jax.Array, "B T D"],
        segment_ids: Int[jax.Array, "B T"],
        source: Float[jax.Array, "B S D"] | None,
        source_segment_ids: Int[jax.Array, "B S"],
        cache: KVCache | None = None,
    ) -> tuple[Float[jax.Array, "B T D"], KVCache]:
        """Attends to the source positions of the same segment.

        Args:
          x: Where the queries come from.
          segment_ids: Segments of `x`.
          source: Where keys and values come from; unused with a cache.
          source_segment_ids: Segments of the source, whose padding is segment 0.
          cache: What an earlier call returned for this source.
        """
        query = laid_out("query", self._queries(x))
        if cache is None:
            assert source is not None
            cache = KVCache(*map(laid_out, ("key", "value"), self._keys_and_values(source)))
        same = segment_ids[:, :, None] == source_segment_ids[:, None, :]
        return self._merged(dot_product_attention(query, *cache, same, self.logit_cap)), cache
