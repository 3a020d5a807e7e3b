"""RoPE scaling: frequencies of a model for a longer context than that of its pretraining."""

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
    """Maps the frequencies of `Rotary`, in radians per position, descending, to those for a longer context."""

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        """The new frequencies, and a factor for sine and cosine."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: `position / factor` (Chen et al., 2023).

    Attributes:
      factor: Ratio of the new context length to the original one.
    """

    factor: PositiveFloat = 1.0

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama31Scaling(RotaryScaling):
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between (Llama 3.1).

    A frequency is low if it makes at most `low_freq_factor` periods in the original context, high if it makes at least
    `high_freq_factor` periods.

    Attributes:
      factor: Ratio of the new context length to the original one.
      low_freq_factor: Periods of the highest low frequency.
      high_freq_factor: Periods of the lowest high frequency.
      original_max_seq_len: The original context length.
    """

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: Tokens = 8192

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        periods = self.original_max_seq_len * frequencies / (2 * math.pi)
        kept = jnp.clip((periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al., 2023): as Llama 3.1, but interpolates by the index of the pair, and sharpens attention.

    Attributes:
      factor: Ratio of the new context length to the original one.
      beta_fast: Periods in the original context of the lowest frequency that is kept.
      beta_slow: Periods of the highest frequency that is divided by the full `factor`.
      original_max_seq_len: The original context length.
      truncate: Whether the indices of these two pairs are rounded outwards to integers.
      attention_factor: Factor of sine and cosine; None = `0.1 ln(factor) + 1`.
    """

    factor: PositiveFloat = 1.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    original_max_seq_len: Tokens = 4096
    truncate: bool = True
    attention_factor: PositiveFloat | None = None

    def __call__(self, frequencies: Float[jax.Array, " R"]) -> tuple[Float[jax.Array, " R"], float]:
        count = len(frequencies)
        # The frequencies are geometric: the index of a pair is linear in the logarithm of its periods.
        first, last = jnp.log(frequencies[0]), jnp.log(frequencies[-1])
        step = (first - last) / max(count - 1, 1)

        def index(periods: float) -> jax.Array:
            return (first - math.log(2 * math.pi * periods / self.original_max_seq_len)) / step

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = jnp.floor(low), jnp.ceil(high)
        low, high = jnp.maximum(low, 0), jnp.minimum(high, 2 * count - 1)
        slowed = jnp.clip((jnp.arange(count) - low) / jnp.maximum(high - low, 1e-3), 0, 1)
        factor = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return frequencies * (1 - slowed + slowed / self.factor), self.attention_factor or factor
