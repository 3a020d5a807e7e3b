"""A bias for how far apart query and key are."""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import PositiveInt, Range, Tokens
from paxcli.layers.base import Layer
from paxcli.layers.init import Gaussian, Init


class RelativeBias(Layer):
    """One learned number for each head and range of distances (T5: Raffel et al., 2020; Pax: `RelativeBias`).

    Half of the ranges hold one distance each; the others widen in geometric steps; all from
    `max_distance` on are one.

    Attributes:
      num_heads: N.
      num_buckets: How many ranges, of both directions together.
      max_distance: Where the last begins.
      bidirectional: Whether half of the ranges are for keys that come after the query; these else count as distance 0.
      params_init: How the table [ranges, N] starts.
    """

    num_heads: PositiveInt
    num_buckets: Annotated[int, Range(min=2)] = 32
    max_distance: Tokens = 128
    bidirectional: bool = False
    params_init: Init = Gaussian(stddev=1.0)

    def setup(self) -> None:
        shape = (self.num_buckets, self.num_heads)
        self.table = self.lookup_table("table", self.params_init, shape, (None, "heads"))

    def __call__(self, distance: Int[jax.Array, "... T S"]) -> Float[jax.Array, "... N T S"]:
        """The bias of keys that lie `distance` positions before their queries; after them, if it is negative."""
        return jnp.moveaxis(jnp.take(self.table, self._bucket(distance), axis=0), -1, -3)

    def _bucket(self, distance: jax.Array) -> jax.Array:
        buckets, after = self.num_buckets, 0
        if self.bidirectional:
            buckets //= 2
            after, distance = jnp.where(distance < 0, buckets, 0), jnp.abs(distance)
        distance = jnp.maximum(distance, 0)
        exact = buckets // 2
        # Share of the way from `exact` to `max_distance`, in logarithms.
        share = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(self.max_distance / exact)
        far = exact + (share * (buckets - exact)).astype(jnp.int32)
        return after + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
