"""Layers on top of each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.config.fields import PositiveInt, SafeOnResume
from paxcli.layers.attention.attention import KVCache
from paxcli.layers.base import Layer
from paxcli.layers.block import EncoderBlock, TransformerBlock
from paxcli.layers.fp8 import FP8_STATE
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import Activation, RematPolicy, saveable


class Stack(Layer):
    """`num_layers` blocks, as one scan over stacked parameters or unrolled.

    Pax: `StackedTransformerRepeated` (scan) and `StackedTransformer`. Scanned parameters have a leading `layers`
    dimension, compile in constant time, and are the default.

    Attributes:
      num_layers: L.
      model_dims: D.
      hidden_dims: F.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K; None = N.
      block: Template of one layer.
      scan: Whether the layers are scanned.
      unroll: How many scanned layers one iteration runs.
      remat_policy: Which activations are kept for the backward pass.
      offload: Which are kept besides, in the host's memory: of `remat.Activation`.
      params_init: How weights start.
    """

    num_layers: PositiveInt
    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    block: functools.partial = template(TransformerBlock)
    scan: bool = True
    unroll: SafeOnResume[PositiveInt] = 1
    remat_policy: SafeOnResume[RematPolicy] = "dots_with_no_batch_dims"
    offload: SafeOnResume[tuple[Activation, ...]] = ()
    params_init: Init = Xavier()

    _num_shared = 2  # what every layer is called with alike, after `x` and the cache

    def setup(self) -> None:
        block = self._with_remat(self.block)
        if self.scan:
            self.layers: Any = self._scanned(block.func, self.num_layers)(**{**block.keywords, **self._widths})
        else:
            self.layers = [block(**self._widths) for _ in range(self.num_layers)]

    @property
    def _widths(self) -> dict[str, Any]:
        return dict(
            model_dims=self.model_dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
            dims_per_head=self.dims_per_head,
            num_kv_heads=self.num_kv_heads,
            params_init=self.params_init,
        )

    def __call__(
        self,
        x: Float[jax.Array, "B T D"],
        cache: KVCache | None,
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        """Runs all layers. The arrays of a cache have a leading `layers` dimension."""
        return self._run(x, cache, segment_ids, segment_pos)

    def _run(self, x: jax.Array, cache: Any, *shared: Any) -> tuple[jax.Array, Any]:
        if self.scan:
            return self.layers(x, cache, *shared)
        return run_in_order(self.layers, x, cache, *shared)

    def _with_remat(self, block: functools.partial) -> functools.partial:
        policy = saveable(self.remat_policy, self.offload)
        if policy is None:
            return block
        # Inside a scan, XLA cannot merge the recomputation with the forward pass, so nothing needs to prevent it.
        return functools.partial(nn.remat(block.func, policy=policy, prevent_cse=not self.scan), **block.keywords)

    def _scanned(self, block_class: Any, length: int) -> Any:
        return nn.scan(
            block_class,
            variable_axes={"params": 0, "metrics": 0, FP8_STATE: 0},
            split_rngs={"params": True},
            in_axes=(0, *(nn.broadcast,) * self._num_shared),
            out_axes=0,
            length=length,
            unroll=self.unroll,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )


class Encoder(Stack):
    """A stack of `EncoderBlock`."""

    block: functools.partial = template(EncoderBlock)


def run_in_order(layers: Sequence[Any], x: jax.Array, cache: Any, *shared: Any) -> tuple[jax.Array, Any]:
    """Runs layers one after the other. The arrays of a cache have a leading dimension of as many."""
    caches = []
    for index, layer in enumerate(layers):
        layer_cache = jax.tree.map(lambda array, i=index: array[i], cache)
        x, layer_cache = layer(x, layer_cache, *shared)
        caches.append(layer_cache)
    return x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *caches)
