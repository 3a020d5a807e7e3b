"""Stacks of several kinds of blocks: that alternate, or that come first."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from paxcli.config.fields import ExtraLayerCount
from paxcli.errors import ConfigError
from paxcli.layers.base import Cache, Layer, cache_of
from paxcli.layers.block import TransformerBlock
from paxcli.layers.stack import Stack, entry_at, repeat_cache, run_in_order


class PatternedStack(Stack):
    """A stack of alternating blocks: layer i is made from template i modulo their number, G.

    Such as layers with a sliding window between layers with global attention (Gemma 2). Scanned, one iteration runs G
    layers: `layers/turn_0` holds layers 0, G, 2G, … and so on. A decode cache is a tuple of G caches, the i-th that of
    layers i, i + G, …, along a leading dimension; unrolled, of one cache per layer. Layers of one more kind may precede
    them, in a stack of their own in `first`, such as dense layers before those with experts (DeepSeek-V3); their cache
    is the last in the tuple.

    Attributes:
      turns: Templates of the alternating blocks. The other fields are those of `Stack`.
      first: Template of the layers before these; None = there are none.
      num_first: Number of layers before these, out of `num_layers`.
      block: None: `turns` replaces it.
    """

    block: functools.partial[TransformerBlock] | None = None  # pyrefly: ignore[bad-override]
    turns: tuple[functools.partial[TransformerBlock], ...] = ()
    first: functools.partial[TransformerBlock] | None = None
    num_first: ExtraLayerCount = 0

    matmul_flops = Stack.matmul_flops

    def setup(self) -> None:
        if self.block is not None:
            raise ConfigError("A PatternedStack has `turns` instead of `block`.", "Set `block` to null.")
        first, turns = self.blocks[: self.num_first], self.blocks[self.num_first :]
        if bool(self.first) != bool(self.num_first):
            hint = "Set both or neither."
            raise ConfigError(f"num_first={self.num_first}, and `first` is {'set' if self.first else 'null'}.", hint)
        if not turns or (self.scan and len(turns) % len(self.turns)):
            layers = f"num_layers={self.num_layers} (num_first={self.num_first}) leaves {len(turns)} layers for `turns`"
            hint = f"Choose a multiple of {len(self.turns)} that is not 0; `scan=false` takes any other number too."
            raise ConfigError(f"{layers}, which has {len(self.turns)}.", hint)
        if first:
            self._first = self._first_stack(name="first")
        if self.scan:
            iterations = len(turns) // len(self.turns)
            kinds = tuple(self._with_remat(turn, iterations) for turn in self.turns)
            self.layers: Any = self._scan(_Turns, iterations)(turns=kinds, widths=self._widths)
        else:
            self.layers = [self._with_remat(turn, len(turns))(**self._widths) for turn in turns]

    @property
    def blocks(self) -> tuple[functools.partial, ...]:
        in_turns = range(self.num_layers - self.num_first if self.turns else 0)
        first = () if self.first is None else (self.first,) * self.num_first
        return first + tuple(self.turns[i % len(self.turns)] for i in in_turns)

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        caches = [cache_of(turn, batch_size, length, dtype) for turn in self._unbound_blocks()[self.num_first :]]
        if self.scan:
            size = len(self.turns)
            caches = [repeat_cache(cache, len(caches) // size) for cache in caches[:size]]
        if self.first:
            caches.append(cache_of(self._first_stack(parent=None), batch_size, length, dtype))
        return tuple(caches)

    def unstack(self, params: dict) -> dict:
        size, names = len(self.turns), range(self.num_layers - self.num_first)
        layers = {f"layers_{i}": entry_at(params["layers"][f"turn_{i % size}"], i // size) for i in names}
        return layers | ({"first": self._first_stack(parent=None).unstack(params["first"])} if self.first else {})

    def __call__(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        if self.first is None:
            return super().__call__(x, cache, *broadcast)
        x, of_first = self._first(x, cache and cache[-1], *broadcast)
        x, cache = super().__call__(x, cache and cache[:-1], *broadcast)
        return x, cache and (*cache, of_first)

    @property
    def _first_stack(self) -> functools.partial:
        fields = self.named_fields("scan", "unroll", "remat_policy", "save", "offload")
        return functools.partial(Stack, num_layers=self.num_first, block=self.first, **fields, **self._widths)


class _Turns(Layer):
    """One layer of each kind."""

    turns: tuple[functools.partial, ...]
    widths: Mapping[str, Any]

    def setup(self) -> None:
        self.layers = [turn(name=f"turn_{i}", **self.widths) for i, turn in enumerate(self.turns)]

    def __call__(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        return run_in_order(self.layers, x, cache, *broadcast)
