"""Statistics of activations, which layers report when a training step asks for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.layers.base import HiddenStates, Ids
from paxcli.mesh.sharding import path_of

SUMMARIES = "summaries"  # the Flax collection that layers report to


class ActivationSums(NamedTuple):
    """Sums over the real tokens of activations, from which follow their mean and standard deviation.

    Attributes:
      total: Sum.
      squares: Sum of squares.
      count: Number of values.
      abs_max: Largest absolute value.
    """

    total: jax.Array
    squares: jax.Array
    count: jax.Array
    abs_max: jax.Array

    def add(self, other: ActivationSums) -> ActivationSums:
        """The sums over the tokens of both."""
        total, squares, count = map(jnp.add, self[:3], other[:3])
        return ActivationSums(total, squares, count, jnp.maximum(self.abs_max, other.abs_max))

    def statistics(self) -> dict[str, jax.Array]:
        """`activation_mean`, `activation_std` and `activation_abs_max` (praxis: those of `xformer_input`)."""
        mean, square = self.total / jnp.maximum(self.count, 1), self.squares / jnp.maximum(self.count, 1)
        std = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0))
        return {"activation_mean": mean, "activation_std": std, "activation_abs_max": self.abs_max}


def report_activation(layer: nn.Module, x: HiddenStates, segment_ids: Ids) -> None:
    """Reports the sums of `x` over its tokens (segment id not 0). Adds no computation unless a step asks for them."""
    if not layer.is_mutable_collection(SUMMARIES) or layer.is_initializing():
        return
    is_token = (segment_ids != 0)[..., None]
    x = jnp.where(is_token, x.astype(jnp.float32), 0)
    count = jnp.sum(is_token, dtype=jnp.float32) * x.shape[-1]
    layer.sow(SUMMARIES, "activation", ActivationSums(x.sum(), jnp.square(x).sum(), count, jnp.abs(x).max()))


def activations_by_layer(reported: Any) -> dict[str, ActivationSums]:
    """Path of a layer, such as `stack/layers`, → its sums; scanned layers share a path and have a dimension [L]."""
    leaves = jax.tree.leaves_with_path(reported, is_leaf=lambda node: isinstance(node, ActivationSums))
    return {"/".join(path_of(path)[:-2]): sums for path, sums in leaves}  # without the name and number of the report
