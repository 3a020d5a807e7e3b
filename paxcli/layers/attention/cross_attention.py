"""Cross-attention: from the positions of one sequence to those of another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import Attention, KVCache, shard_heads
from paxcli.layers.base import HiddenStates, Ids, SourceIds
from paxcli.layers.flops import Flops


class CrossAttention(Attention):
    """Multi-head attention whose keys and values come from a source sequence (Vaswani et al., 2017, section 3.2.3).

    Pax: the `cross_attention` of `praxis.layers.Transformer`. The fields are those of `Attention`. The positions of the
    two sequences have no common order, so `causal` has to be False, and `rotary`, `window`, `relative_bias` and
    `temperature_growth` None.
    """

    causal: bool = False
    combine_qkv: bool = False

    def setup(self) -> None:
        if self.causal or any(self.named_fields("rotary", "relative_bias", "temperature_growth").values()):
            hint = "Leave `causal` False, `rotary`, `relative_bias` and `temperature_growth` None."
            raise ConfigError("Cross-attention has no order of positions.", hint)
        if self.kernel not in ("auto", "xla"):
            raise ConfigError(f"Cross-attention has no kernel `{self.kernel}`.", "Set `kernel` to `auto` or `xla`.")
        super().setup()

    def __call__(  # pyrefly: ignore[bad-override]
        self,
        x: HiddenStates,
        segment_ids: Ids,
        source: Float[jax.Array, "B S D"] | None,
        source_segment_ids: SourceIds,
        cache: KVCache | None = None,
    ) -> tuple[HiddenStates, KVCache]:
        """Attends to the source positions of the same segment.

        Args:
          x: Input of the queries.
          segment_ids: Segments of `x`.
          source: Input of keys and values; unused with a cache.
          source_segment_ids: Segments of the source; padding is segment 0.
          cache: Keys and values of this source, as an earlier call returned them.
        """
        query = shard_heads("query", self._queries(x))
        if cache is None:
            assert source is not None
            key, value = map(shard_heads, ("key", "value"), self._keys_and_values(source))
            cache = KVCache(jnp.swapaxes(key, 2, 3), value)
        same = segment_ids[:, :, None] == source_segment_ids[:, None, :]
        return self._attend_to_visible(query, cache.in_rows, same), cache

    def matmul_flops(self, *shape: int) -> Flops | None:
        batch, length, source_length = shape
        return self._flops(batch * length, batch * source_length, batch * length * source_length)
