"""Matmul FLOPs of a forward pass, by kind. Each layer counts its own; blocks, stacks and models add them up.

The count is the one customary for MFU: matmuls only, each multiply-add as two. Norms, embedding look-ups and whatever
remat (activation checkpointing) recomputes do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of matmuls.

    Attributes:
      weights: Activations times learned matrices, the logits included.
      attention: Queries times keys, and probabilities times values.
    """

    weights: int | float = 0
    attention: int | float = 0

    @property
    def total(self) -> int | float:
        """Both kinds together."""
        return self.weights + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.weights + other.weights, self.attention + other.attention)

    def __mul__(self, factor: int) -> Flops:
        return Flops(factor * self.weights, factor * self.attention)


def sum_flops(parts: Iterable[Flops | None]) -> Flops | None:
    """The sum; None (unknown) if any part is unknown."""
    found = list(parts)
    return None if None in found else sum(filter(None, found), Flops())


def matrix_flops(rows: Iterable[int], parameters: int) -> Flops:
    """FLOPs of [*rows, …] times matrices with `parameters` entries in all."""
    return Flops(weights=2 * math.prod(rows) * parameters)


def visible_pairs(length: int, causal: bool, window: int | None = None, chunked: bool = False) -> int | float:
    """Query-key pairs of one row that the mask leaves visible.

    A causal mask counts half the square, so its diagonal by half, as Megatron-LM and MaxText (since July 2025) do.
    """
    if not causal:
        return length**2
    window = length if window is None else min(window, length)
    if chunked:
        return length // window * window**2 / 2 + (length % window) ** 2 / 2
    return length * window - window**2 / 2
