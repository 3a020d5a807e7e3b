"""Stacks of transformer blocks: scanned over stacked parameters, or unrolled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.config.configurable import template
from paxcli.config.fields import LayerCount, PositiveInt, SafeOnResume
from paxcli.errors import ConfigError
from paxcli.layers.base import Cache, HiddenStates, LayerStack, Visibility, cache_of, flops_of, visibility_of
from paxcli.layers.block import EncoderBlock, TransformerBlock
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.fp8 import FP8_STATE
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import Activation, RematPolicy, saveable
from paxcli.layers.summaries import SUMMARIES


class Stack(LayerStack):
    """`num_layers` blocks, as one scan over stacked parameters or unrolled.

    Pax: `StackedTransformerRepeated` (scan) and `StackedTransformer`. Scanned parameters have a leading `layers`
    dimension, and so has a decode cache; the compile time does not grow with `num_layers`. The decode cache of unrolled
    layers is a tuple of theirs.

    Attributes:
      num_layers: L.
      model_dims: D.
      hidden_dims: F.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K; None = N.
      block: Template of one layer.
      scan: Whether the layers are scanned.
      unroll: Layers per iteration of the scan.
      remat_policy: Which activations are saved for the backward pass (activation checkpointing).
      save: Activations saved besides in device memory, by their names in `remat.Activation`.
      offload: Activations saved besides in pinned host memory, by the same names.
      params_init: Initializer of the weights.
    """

    num_layers: LayerCount
    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    block: functools.partial = template(TransformerBlock)
    scan: bool = True
    unroll: SafeOnResume[PositiveInt] = 1
    remat_policy: SafeOnResume[RematPolicy] = "dots_with_no_batch_dims"
    save: SafeOnResume[tuple[Activation, ...]] = ()
    offload: SafeOnResume[tuple[Activation, ...]] = ()
    params_init: Init = Xavier()

    _num_broadcast = 2  # arguments broadcast to every layer, after `x` and the cache

    def setup(self) -> None:
        block = self._with_remat(self.block, iterations=self.num_layers)
        if self.scan:
            self.layers: Any = self._scan(block.func, self.num_layers)(**{**block.keywords, **self._widths})
        else:
            self.layers = [block(**self._widths) for _ in range(self.num_layers)]

    @property
    def blocks(self) -> tuple[functools.partial, ...]:
        """The template of each layer, in order."""
        return (self.block,) * self.num_layers

    def matmul_flops(self, *shape: int) -> Flops | None:
        return sum_flops(flops_of(block, *shape) for block in self._unbound_blocks())

    @property
    def visibility(self) -> Visibility:
        found = {visibility_of(block) for block in self._unbound_blocks()}
        if len(found) > 1 and "prefix" in found:
            raise ConfigError("Some blocks have `bidirectional_prefix`, others do not.", "Set it for all or none.")
        return found.pop() if len(found) == 1 else "segment"

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        caches = tuple(cache_of(block, batch_size, length, dtype) for block in self._unbound_blocks())
        return repeat_cache(caches[0], self.num_layers) if self.scan else caches

    @nn.nowrap
    def unstack(self, params: dict) -> dict:
        """The parameters of the same layers with `scan=False`, from scanned ones."""
        return {f"layers_{i}": entry_at(params["layers"], i) for i in range(self.num_layers)}

    @nn.nowrap
    def _unbound_blocks(self) -> list[nn.Module]:
        return [block(**self._widths, parent=None) for block in self.blocks]

    @property
    def _widths(self) -> dict[str, Any]:
        attention = self.named_fields("num_heads", "dims_per_head", "num_kv_heads")
        return self.named_fields("model_dims", "hidden_dims", "params_init") | attention

    def __call__(self, x: HiddenStates, cache: Cache, *broadcast: Any) -> tuple[HiddenStates, Cache]:
        """Runs all layers. Every block also takes `broadcast`: the segment ids and positions, both [B, T], of `x`."""
        return self.layers(x, cache, *broadcast) if self.scan else run_in_order(self.layers, x, cache, *broadcast)

    def _with_remat(self, block: functools.partial, iterations: int) -> functools.partial:
        if (policy := saveable(self.remat_policy, self.offload, self.save)) is None:
            return block
        # Across iterations of a scan, XLA cannot merge recomputation with the forward pass (CSE). It inlines a loop of
        # one iteration.
        is_loop = self.scan and self.unroll < iterations
        return functools.partial(nn.remat(block.func, policy=policy, prevent_cse=not is_loop), **block.keywords)

    def _scan(self, block_class: Any, length: int) -> Any:
        return nn.scan(
            block_class,
            variable_axes={"params": 0, "metrics": 0, SUMMARIES: 0, FP8_STATE: 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, *(nn.broadcast,) * self._num_broadcast),
            out_axes=0,
            length=length,
            unroll=1 if self.is_initializing() else self.unroll,  # it runs once: compiling it is what takes time
            metadata_params={nn.PARTITION_NAME: "layers"},
            # The check traces the block once more. Without it, a seed would give other initial parameters.
            check_constancy_invariants=self.is_initializing(),
        )


class Encoder(Stack):
    """A stack of `EncoderBlock`."""

    block: functools.partial = template(EncoderBlock)


def find_stacks(**layers: nn.Module) -> dict[str, Stack]:
    """Those of a model's layers, by field, that are stacks; a user's own may be any module."""
    return {field: layer for field, layer in layers.items() if isinstance(layer, Stack)}


def run_in_order(layers: Sequence[Any], x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
    """Runs layers one after the other. The cache is a tuple of theirs."""
    new = []
    for layer, of_layer in zip(layers, (None,) * len(layers) if cache is None else cache, strict=True):
        x, of_layer = layer(x, of_layer, *broadcast)
        new.append(of_layer)
    return x, None if cache is None else tuple(new)


def repeat_cache(cache: Cache, count: int) -> Cache:
    """A cache with a leading dimension: `count` copies."""
    return jax.tree.map(lambda array: jnp.broadcast_to(array, (count, *array.shape)), cache)


def entry_at(tree: Any, index: int) -> Any:
    """Entry `index` of the leading dimension of each array."""
    return jax.tree.map(lambda array: array[index], tree)
