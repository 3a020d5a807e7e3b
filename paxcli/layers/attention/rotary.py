"""Rotary position embedding (RoPE)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import PositiveFloat, PositiveFraction, PositiveInt
from paxcli.layers.attention.rotary_scaling import RotaryScaling
from paxcli.layers.base import Layer
from paxcli.mesh.sharding import current_device


class Rotary(Layer):
    """RoPE (Su et al., 2021): rotates feature pairs (i, i + R/2) by an angle proportional to the position.

    The angle of pair i is `position / timescale_i`, with R/2 time scales in geometric steps from `min_timescale` to
    just below `max_timescale` (Pax: `praxis.layers.RotaryPositionalEmbedding`).

    Attributes:
      dims_per_head: H.
      fraction: Share of the features that are rotated, the first R = `fraction` * H, an even number (partial RoPE).
      min_timescale: Period / 2π of the fastest pair.
      max_timescale: Upper bound of the slowest pair's period / 2π (RoPE theta, base frequency).
      scaling: Scaling of the frequencies for a longer context than that of pretraining; None = off.
    """

    dims_per_head: PositiveInt
    fraction: PositiveFraction = 1.0
    min_timescale: PositiveFloat = 1.0
    max_timescale: PositiveFloat = 10_000.0
    scaling: RotaryScaling | None = None

    def __call__(self, x: Float[jax.Array, "B N T H"], positions: Int[jax.Array, "B T"]) -> Float[jax.Array, "B N T H"]:
        half = int(self.dims_per_head * self.fraction) // 2
        if not half:
            return x
        steps = jnp.arange(half, dtype=jnp.float32) / half
        frequencies = (self.max_timescale / self.min_timescale) ** -steps / self.min_timescale
        frequencies, factor = (frequencies, 1.0) if self.scaling is None else self.scaling(frequencies)
        angles = positions[:, None, :, None].astype(jnp.float32) * frequencies  # [B, 1, T, R/2]
        sin, cos = factor * jax.lax.platform_dependent(angles, cpu=_behind_a_condition, default=_sine_and_cosine)
        if current_device().platform == "tpu":
            return _rotate_by_matmul(x, sin, cos)
        first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def _rotate_by_matmul(x: Float[jax.Array, "B N T H"], sin: jax.Array, cos: jax.Array) -> Float[jax.Array, "B N T H"]:
    """Rotates pairs by angles with these sines and cosines, [B, 1, T, R/2].

    A TPU takes long to exchange the two halves of a row of its vector unit. Its matrix unit does it on the way: the
    matrix has one 1 in each column, so the product is exact.
    """
    half, dims = sin.shape[-1], x.shape[-1]
    swap = jnp.eye(dims, dtype=x.dtype)[:, jnp.array([*range(half, 2 * half), *range(half), *range(2 * half, dims)])]
    # Remat policies save matmuls without a batch dimension; so this one has a batch dimension, of size 1.
    other = jnp.einsum("zbnth,zhk->zbntk", x[None], swap[None], precision=jax.lax.Precision.HIGHEST)[0]
    still = ((0, 0),) * 3 + ((0, dims - 2 * half),)
    cos = jnp.pad(jnp.concatenate([cos, cos], axis=-1), still, constant_values=1.0)
    sin = jnp.pad(jnp.concatenate([-sin, sin], axis=-1), still)
    return (x * cos + other * sin).astype(x.dtype)


def _sine_and_cosine(angles: Float[jax.Array, "B 1 T R"]) -> Float[jax.Array, "2 B 1 T R"]:
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)])


def _behind_a_condition(angles: Float[jax.Array, "B 1 T R"]) -> Float[jax.Array, "2 B 1 T R"]:
    """As `_sine_and_cosine`, but computed once: otherwise XLA computes both again in every fusion that reads them.

    On a CPU that took a seventh of a training step. XLA fuses no conditionals, and JAX moves this one out of a scan
    over layers. The condition always holds. GPUs and TPUs compute them again at almost no cost.
    """
    zeros = jnp.zeros((2, *angles.shape), angles.dtype)
    return jax.lax.cond(angles.ravel()[-1] < jnp.inf, _sine_and_cosine, lambda _: zeros, angles)
