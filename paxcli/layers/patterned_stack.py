"""Layers of several kinds, in turn."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from paxcli.errors import ConfigError
from paxcli.layers.base import Layer
from paxcli.layers.block import TransformerBlock
from paxcli.layers.stack import Stack, run_in_order


class PatternedStack(Stack):
    """A stack whose layers take turns: layer i is made from template i modulo their number, G.

    Scanned, one iteration runs G layers: `layers/turn_0` holds layers 0, G, 2G, … and so on.

    Attributes:
      turns: Templates of the layers, such as one with a window and one without. The other fields are those of `Stack`.
      block: None: `turns` take its place.
    """

    block: functools.partial[TransformerBlock] | None = None  # pyrefly: ignore[bad-override]
    turns: tuple[functools.partial[TransformerBlock], ...] = ()

    def setup(self) -> None:
        if self.block is not None:
            raise ConfigError("A PatternedStack has `turns` in place of a `block`.", "Set `block` to null.")
        if not self.turns or (self.scan and self.num_layers % len(self.turns)):
            raise ConfigError(
                f"num_layers={self.num_layers} does not divide into `turns` of {len(self.turns)} layers.",
                "Choose a multiple, or set `scan=false`.",
            )
        if self.scan:
            turns = tuple(self._with_remat(turn) for turn in self.turns)
            self.layers: Any = self._scanned(_Turns, self.num_layers // len(turns))(turns=turns, widths=self._widths)
        else:
            turns = [self.turns[i % len(self.turns)] for i in range(self.num_layers)]
            self.layers = [self._with_remat(turn)(**self._widths) for turn in turns]

    def _run(self, x: jax.Array, cache: Any, *shared: Any) -> tuple[jax.Array, Any]:
        if not self.scan:
            return super()._run(x, cache, *shared)
        size = len(self.turns)
        cache = jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), cache)
        x, cache = super()._run(x, cache, *shared)
        return x, jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), cache)


class _Turns(Layer):
    """One layer of each kind."""

    turns: tuple[functools.partial, ...]
    widths: Mapping[str, Any]

    def setup(self) -> None:
        self.layers = [turn(name=f"turn_{i}", **self.widths) for i, turn in enumerate(self.turns)]

    def __call__(self, x: jax.Array, cache: Any, *shared: Any) -> tuple[jax.Array, Any]:
        return run_in_order(self.layers, x, cache, *shared)
