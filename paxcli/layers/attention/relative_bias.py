"""Relative position bias (T5)."""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import PositiveInt, Range, Tokens
from paxcli.errors import ConfigError
from paxcli.layers.base import Layer
from paxcli.layers.init import Gaussian, Init
from paxcli.layers.shared_weights import look_up


class RelativeBias(Layer):
    """One learned logit bias per head and bucket of distances (T5: Raffel et al., 2020; Pax: `RelativeBias`).

    Half of the buckets hold one distance each; the others widen geometrically, and the last holds all distances from
    `max_distance` on.

    Attributes:
      num_heads: N.
      num_buckets: Number of buckets, for both directions together.
      max_distance: Smallest distance of the last bucket, above those that have a bucket each.
      bidirectional: Whether half of the buckets are for keys after the query; otherwise these count as distance 0.
      params_init: Initializer of the table [buckets, N].
    """

    num_heads: PositiveInt
    num_buckets: Annotated[int, Range(min=2)] = 32
    max_distance: Tokens = 128
    bidirectional: bool = False
    params_init: Init = Gaussian(stddev=1.0)

    def setup(self) -> None:
        exact = self.num_buckets // (4 if self.bidirectional else 2)
        if not 0 < exact < self.max_distance:
            cause = f"num_buckets={self.num_buckets} gives {exact} distances a bucket each"
            raise ConfigError(f"{cause}: too few, or not below max_distance={self.max_distance}.", "Raise one of them.")
        self.table = self.lookup_table("table", self.params_init, (self.num_buckets, self.num_heads), (None, "heads"))

    def __call__(self, distance: Int[jax.Array, "... T S"]) -> Float[jax.Array, "... N T S"]:
        """The bias of keys `distance` positions before their queries; a negative distance is after them."""
        return jnp.moveaxis(look_up(self.table, self._bucket(distance)), -1, -3)

    def _bucket(self, distance: jax.Array) -> jax.Array:
        buckets, after = self.num_buckets, 0
        if self.bidirectional:
            buckets //= 2
            after, distance = jnp.where(distance < 0, buckets, 0), jnp.abs(distance)
        distance, exact = jnp.maximum(distance, 0), buckets // 2
        # Position between `exact` (0) and `max_distance` (1), on a logarithmic scale.
        share = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(self.max_distance / exact)
        far = exact + (share * (buckets - exact)).astype(jnp.int32)
        return after + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
