"""Where a token stands, as a rotation of queries and keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import PositiveFloat, PositiveFraction, PositiveInt
from paxcli.layers.attention.rotary_scaling import RotaryScaling
from paxcli.layers.base import Layer


class Rotary(Layer):
    """Turns pairs of features (i, i + R/2) by an angle that grows with the position (Su et al., 2021).

    Pair i turns by `position / timescale_i`, with R/2 time scales in geometric steps from `min_timescale` to just below
    `max_timescale` (Pax: `praxis.layers.RotaryPositionalEmbedding`).

    Attributes:
      dims_per_head: H.
      fraction: Share of the features that turn, the first R = `fraction` * H, an even number; the others stay.
      min_timescale: Period / 2π of the fastest pair.
      max_timescale: What the slowest approaches ("theta").
      scaling: How the frequencies change for sequences longer than those of the first training; None = not at all.
    """

    dims_per_head: PositiveInt
    fraction: PositiveFraction = 1.0
    min_timescale: PositiveFloat = 1.0
    max_timescale: PositiveFloat = 10_000.0
    scaling: RotaryScaling | None = None

    def __call__(self, x: Float[jax.Array, "B N T H"], positions: Int[jax.Array, "B T"]) -> Float[jax.Array, "B N T H"]:
        half = int(self.dims_per_head * self.fraction) // 2
        steps = jnp.arange(half, dtype=jnp.float32) / half
        frequencies = (self.max_timescale / self.min_timescale) ** -steps / self.min_timescale
        factor = 1.0
        if self.scaling is not None:
            frequencies, factor = self.scaling(frequencies)
        angles = positions[:, None, :, None].astype(jnp.float32) * frequencies  # [B, 1, T, R/2]
        sin, cos = factor * jnp.sin(angles), factor * jnp.cos(angles)
        first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
