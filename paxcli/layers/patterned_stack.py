"""Stacks of several kinds of blocks: that alternate, or that come first."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.typing

from paxcli.config.fields import NonNegativeInt
from paxcli.errors import ConfigError
from paxcli.layers.base import Cache, Layer, cache_of
from paxcli.layers.block import TransformerBlock
from paxcli.layers.stack import Stack, cache_at, repeat_cache, run_in_order, stack_caches


class PatternedStack(Stack):
    """A stack of alternating blocks: layer i is made from template i modulo their number, G.

    Such as layers with a sliding window between layers with global attention (Gemma 2). Scanned, one iteration runs G
    layers: `layers/turn_0` holds layers 0, G, 2G, … and so on. A decode cache is a tuple of G caches, the i-th that of
    layers i, i + G, …, along a leading dimension. Layers of one more kind may precede them, in a stack of their own in
    `first`, such as dense layers before those with experts (DeepSeek-V3); their cache is the last in the tuple.

    Attributes:
      turns: Templates of the alternating blocks. The other fields are those of `Stack`.
      first: Template of the layers before these; None = there are none.
      num_first: Number of layers before these, out of `num_layers`.
      block: None: `turns` replaces it.
    """

    block: functools.partial[TransformerBlock] | None = None  # pyrefly: ignore[bad-override]
    turns: tuple[functools.partial[TransformerBlock], ...] = ()
    first: functools.partial[TransformerBlock] | None = None
    num_first: NonNegativeInt = 0

    matmul_flops = Stack.matmul_flops

    def setup(self) -> None:
        if self.block is not None:
            raise ConfigError("A PatternedStack has `turns` instead of `block`.", "Set `block` to null.")
        first, turns = self.blocks[: self.num_first], self.blocks[self.num_first :]
        if bool(self.first) != bool(self.num_first):
            hint = "Set both or neither."
            raise ConfigError(f"num_first={self.num_first}, and `first` is {'set' if self.first else 'null'}.", hint)
        if not turns or (self.scan and len(turns) % len(self.turns)):
            raise ConfigError(
                f"num_layers={self.num_layers} (num_first={self.num_first}) does not divide into `turns` of "
                f"{len(self.turns)} layers.",
                "Choose a multiple, or set `scan=false`.",
            )
        if first:
            self._first = self._first_stack(name="first")
        if self.scan:
            kinds = tuple(self._with_remat(turn) for turn in self.turns)
            self.layers: Any = self._scan(_Turns, len(turns) // len(kinds))(turns=kinds, widths=self._widths)
        else:
            self.layers = [self._with_remat(turn)(**self._widths) for turn in turns]

    @property
    def blocks(self) -> tuple[functools.partial, ...]:
        in_turns = range(self.num_layers - self.num_first if self.turns else 0)
        first = () if self.first is None else (self.first,) * self.num_first
        return first + tuple(self.turns[i % len(self.turns)] for i in in_turns)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        turns = self._unbound_blocks()[self.num_first :]
        size = len(self.turns)
        caches = [
            repeat_cache(cache_of(turn, batch_size, length, dtype), len(turns[i::size]))
            for i, turn in enumerate(turns[:size])
        ]
        if self.first:
            caches.append(cache_of(self._first_stack(parent=None), batch_size, length, dtype))
        return tuple(caches)

    def __call__(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        if self.first is None:
            return self._run_turns(x, cache, *broadcast)
        if cache is None:
            return self._run_turns(self._first(x, None, *broadcast)[0], None, *broadcast)
        x, of_first = self._first(x, cache[-1], *broadcast)
        x, cache = self._run_turns(x, cache[:-1], *broadcast)
        return x, (*cache, of_first)

    def _run_turns(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        if self.scan:
            return self.layers(x, cache, *broadcast)
        if cache is None:
            return run_in_order(self.layers, x, [None] * len(self.layers), *broadcast)[0], None
        size = len(cache)
        caches = [cache_at(cache[i % size], i // size) for i in range(len(self.layers))]
        x, caches = run_in_order(self.layers, x, caches, *broadcast)
        return x, tuple(stack_caches(caches[i::size]) for i in range(size))

    @property
    def _first_stack(self) -> functools.partial:
        fields = self.named_fields("scan", "unroll", "remat_policy", "offload")
        return functools.partial(Stack, num_layers=self.num_first, block=self.first, **fields, **self._widths)


class _Turns(Layer):
    """One layer of each kind."""

    turns: tuple[functools.partial, ...]
    widths: Mapping[str, Any]

    def setup(self) -> None:
        self.layers = [turn(name=f"turn_{i}", **self.widths) for i, turn in enumerate(self.turns)]

    def __call__(self, x: jax.Array, cache: Cache, *broadcast: Any) -> tuple[jax.Array, Cache]:
        x, caches = run_in_order(self.layers, x, (None,) * len(self.turns) if cache is None else cache, *broadcast)
        return x, None if cache is None else tuple(caches)
