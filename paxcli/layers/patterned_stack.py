"""Stacks of several kinds of blocks that alternate."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.typing

from paxcli.errors import ConfigError
from paxcli.layers.base import Cache, Layer, cache_of
from paxcli.layers.block import TransformerBlock
from paxcli.layers.stack import Stack, cache_at, repeat_cache, run_in_order, stack_caches


class PatternedStack(Stack):
    """A stack of alternating blocks: layer i is made from template i modulo their number, G.

    Such as layers with a sliding window between layers with global attention (Gemma 2). Scanned, one iteration runs G
    layers: `layers/turn_0` holds layers 0, G, 2G, … and so on. A decode cache is a tuple of G caches, the i-th that of
    layers i, i + G, …, along a leading dimension.

    Attributes:
      turns: Templates of the alternating blocks. The other fields are those of `Stack`.
      block: None: `turns` replaces it.
    """

    block: functools.partial[TransformerBlock] | None = None  # pyrefly: ignore[bad-override]
    turns: tuple[functools.partial[TransformerBlock], ...] = ()

    def setup(self) -> None:
        if self.block is not None:
            raise ConfigError("A PatternedStack has `turns` instead of `block`.", "Set `block` to null.")
        if not self.turns or (self.scan and self.num_layers % len(self.turns)):
            raise ConfigError(
                f"num_layers={self.num_layers} does not divide into `turns` of {len(self.turns)} layers.",
                "Choose a multiple, or set `scan=false`.",
            )
        if self.scan:
            turns = tuple(self._with_remat(turn) for turn in self.turns)
            self.layers: Any = self._scan(_Turns, self.num_layers // len(turns))(turns=turns, widths=self._widths)
        else:
            turns = [self.turns[i % len(self.turns)] for i in range(self.num_layers)]
            self.layers = [self._with_remat(turn)(**self._widths) for turn in turns]

    @property
    def blocks(self) -> tuple[functools.partial, ...]:
        return self.turns[: self.num_layers]

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        blocks = self._unbound_blocks()
        return tuple(
            repeat_cache(cache_of(block, batch_size, length, dtype), len(range(i, self.num_layers, len(blocks))))
            for i, block in enumerate(blocks)
        )

    def _run(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        if self.scan:
            return self.layers(x, cache, *broadcast)
        if cache is None:
            return run_in_order(self.layers, x, [None] * self.num_layers, *broadcast)[0], None
        size = len(self.blocks)
        caches = [cache_at(cache[i % size], i // size) for i in range(self.num_layers)]
        x, caches = run_in_order(self.layers, x, caches, *broadcast)
        return x, tuple(stack_caches(caches[i::size]) for i in range(size))


class _Turns(Layer):
    """One layer of each kind."""

    turns: tuple[functools.partial, ...]
    widths: Mapping[str, Any]

    def setup(self) -> None:
        self.layers = [turn(name=f"turn_{i}", **self.widths) for i, turn in enumerate(self.turns)]

    def __call__(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        x, caches = run_in_order(self.layers, x, (None,) * len(self.turns) if cache is None else cache, *broadcast)
        return x, None if cache is None else tuple(caches)
