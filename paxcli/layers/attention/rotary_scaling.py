"""How rotations change when a model reads sequences longer than those it was first trained on."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveFloat, Tokens


@dataclasses.dataclass(frozen=True)
class RotaryScaling(Configurable):
    """Maps the frequencies of `Rotary`, in radians a position and falling, to those of a longer context."""

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        """The new frequencies, and what sine and cosine are multiplied by."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Every position counts as `position / factor` (Chen et al., 2023).

    Attributes:
      factor: How many times longer sequences are.
    """

    factor: PositiveFloat = 1.0

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama31Scaling(RotaryScaling):
    """Slow pairs are slowed down by `factor`, fast ones are kept, and those between are mixed (Llama 3.1).

    A pair is slow if it turns at most `low_freq_factor` times in the original context, fast if at least
    `high_freq_factor` times.

    Attributes:
      factor: How many times longer sequences are.
      low_freq_factor: Turns of the fastest of the slow pairs.
      high_freq_factor: Turns of the slowest of the fast ones.
      original_max_seq_len: The original context.
    """

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: Tokens = 8192

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """Like Llama 3.1's, but mixed by the pair's index, and with sharper attention (YaRN: Peng et al., 2023).

    Attributes:
      factor: How many times longer sequences are.
      beta_fast: Turns in the original context of the slowest pair that is kept.
      beta_slow: Turns of the fastest pair that is slowed down by all of `factor`.
      original_max_seq_len: The original context.
      truncate: Whether the indices of these two pairs are rounded outwards to whole ones.
      attention_factor: What sine and cosine are multiplied by; None = `0.1 ln(factor) + 1`.
    """

    factor: PositiveFloat = 1.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    original_max_seq_len: Tokens = 4096
    truncate: bool = True
    attention_factor: PositiveFloat | None = None

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        count = len(frequencies)
        # The frequencies are geometric: the index of a pair is linear in the logarithm of its turns.
        first, last = jnp.log(frequencies[0]), jnp.log(frequencies[-1])
        step = (first - last) / max(count - 1, 1)

        def index(turns: float) -> jax.Array:
            return (first - math.log(2 * math.pi * turns / self.original_max_seq_len)) / step

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = jnp.floor(low), jnp.ceil(high)
        low, high = jnp.maximum(low, 0), jnp.minimum(high, 2 * count - 1)
        slowed = jnp.clip((jnp.arange(count) - low) / jnp.maximum(high - low, 1e-3), 0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return frequencies * (1 - slowed + slowed / self.factor), factor
