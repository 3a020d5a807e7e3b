"""A layer whose halves work side by side."""

from __future__ import annotations

import jax
from jaxtyping import Float, Int

from paxcli.layers.attention import KVCache
from paxcli.layers.block import TransformerBlock
from paxcli.layers.residual import as_residual


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
