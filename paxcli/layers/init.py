"""Weight initializers. The model sets one, and every layer inherits it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paxcli.config.configurable import Configurable
from paxcli.config.fields import NonNegativeFloat

Initializer = Callable[..., jax.Array]
Dims = Sequence[int]


def _size(shape: Dims, axes: Dims) -> int:
    return math.prod(shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class Init(Configurable):
    """Makes initializers from the contracted (`fan_in`) and produced (`fan_out`) dimensions of a weight."""

    def scale(self, shape: Dims, fan_in: Dims, fan_out: Dims, fused: int = 1) -> float | None:
        """The scale of the initial values: standard deviation if normal, limit if uniform; None = unknown.

        Takes the shape of the weight, and the arguments of `weight`.
        """
        return None

    def weight(self, fan_in: Dims, fan_out: Dims, fused: int = 1) -> Initializer:
        """The initializer `(key, shape) -> array` of a weight.

        Args:
          fan_in: The contracted dimensions of the shape.
          fan_out: The produced dimensions.
          fused: Number of weights of this shape that share one input and could be stored as one: 3 for query, key and
            value.
        """
        return lambda key, shape: self._draw(key, shape, self.scale(shape, fan_in, fan_out, fused))

    def _draw(self, key: jax.Array, shape: Dims, scale: Any) -> jax.Array:
        return scale * jax.random.normal(key, shape, jax.numpy.float32)

    def table_scale(self, dims: int) -> float:
        """The standard deviation of a new embedding table whose rows have `dims` features."""
        return dims**-0.5

    def table(self, dims: int) -> Initializer:
        """The initializer of an embedding table whose rows have `dims` features."""
        return jax.nn.initializers.normal(self.table_scale(dims))


class _Uniform(Init):
    """Uniform within `scale`."""

    def _draw(self, key: jax.Array, shape: Dims, scale: Any) -> jax.Array:
        return jax.random.uniform(key, shape, jax.numpy.float32, -scale, scale)


@dataclasses.dataclass(frozen=True)
class Xavier(_Uniform):
    """Uniform within sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""

    def scale(self, shape: Dims, fan_in: Dims, fan_out: Dims, fused: int = 1) -> float:
        return math.sqrt(6 / (_size(shape, fan_in) + _size(shape, fan_out)))


@dataclasses.dataclass(frozen=True)
class PraxisXavier(_Uniform):
    """Xavier as praxis computes it, to initialize as Pax does.

    Matrices are as in `Xavier`. For a weight with more dimensions, praxis takes the last two as fan-in and fan-out, and
    multiplies both by all the others. Its attention projections are [D, N, H], and query, key and value are one weight
    [3, D, N, H] (see `Attention.combine_qkv`), so the limits are sqrt(6 / (D * (N + H))) and
    sqrt(6 / (3 * D * (N + H))): far below Xavier's.
    """

    def scale(self, shape: Dims, fan_in: Dims, fan_out: Dims, fused: int = 1) -> float:
        # Two dimensions contracted or produced together are heads and head size, which are last in praxis.
        last_two = next((axes for axes in (fan_in, fan_out) if len(axes) == 2), range(len(shape))[-2:])
        others = math.prod(shape) // _size(shape, last_two) * (fused if len(shape) > 2 else 1)
        return math.sqrt(6 / (others * sum(shape[axis] for axis in last_two)))


@dataclasses.dataclass(frozen=True)
class Gaussian(Init):
    """Normal with one standard deviation for all weights, and one for all tables.

    Attributes:
      stddev: Standard deviation; None = 1 / sqrt(fan_in) for weights and 1 / sqrt(dims) for tables.
      table_stddev: Standard deviation of tables; None = `stddev`.
    """

    stddev: NonNegativeFloat | None = None
    table_stddev: NonNegativeFloat | None = None

    def scale(self, shape: Dims, fan_in: Dims, fan_out: Dims, fused: int = 1) -> float:
        return self.stddev if self.stddev is not None else _size(shape, fan_in) ** -0.5

    def table_scale(self, dims: int) -> float:
        stddev = self.stddev if self.table_stddev is None else self.table_stddev
        return stddev if stddev is not None else dims**-0.5
