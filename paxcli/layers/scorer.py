"""How a layer scores the vocabulary, apart from the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax


class Scorer(NamedTuple):
    """What a loss needs to score tokens a few at a time, and to make gradients of the scores itself.

    Attributes:
      score: `(params, x) -> logits`, [B, T, D] to [B, T, V].
      params: The arrays that it reads.
      axes: Their logical axes.
    """

    score: Callable[[dict[str, jax.Array], jax.Array], jax.Array]
    params: dict[str, jax.Array]
    axes: dict[str, tuple[str, ...]]
