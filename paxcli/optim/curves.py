"""Schedules that follow one curve from a point (step, factor) to another."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from paxcli.config.fields import Derived, Fraction, NonNegativeFloat, PositiveFloat, StepNumber, Steps
from paxcli.errors import ConfigError
from paxcli.optim.schedules import Schedule, require

Point = tuple[StepNumber, NonNegativeFloat]


@dataclasses.dataclass(frozen=True)
class _Curve(Schedule):
    """A curve from `start` to `limit`, constant before and after."""

    start: Point = (0, 1.0)
    limit: Point = (1, 1.0)

    def validate(self) -> None:
        (first, _), (last, _) = self.start, self.limit
        if first >= last:
            hint = "Correct `start` or `limit`."
            raise ConfigError(f"{type(self).__name__}: step {first} of `start` is not before {last} of `limit`.", hint)

    def progress(self, step: jax.Array) -> jax.Array:
        """How far `step` is from `start` to `limit`, as a fraction from 0 to 1."""
        return jnp.clip((step - self.start[0]) / (self.limit[0] - self.start[0]), 0.0, 1.0)

    def rise(self, progress: jax.Array) -> jax.Array:
        """How far the factor is from that of `start` to that of `limit`, as a fraction from 0 to 1."""
        return progress

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.limit[1] + (1 - self.rise(self.progress(step))) * (self.start[1] - self.limit[1])


@dataclasses.dataclass(frozen=True)
class Polynomial(_Curve):
    """Polynomial from `start` to `limit`, constant before and after (Pax: the same name).

    Attributes:
      start: First step of the curve, and the factor there.
      limit: Last step, and the factor there.
      power: Exponent.
      origin: The end at which the slope is 0, for a power above 1.
    """

    power: PositiveFloat = 1.0
    origin: Literal["start", "limit"] = "start"

    def rise(self, progress: jax.Array) -> jax.Array:
        return progress**self.power if self.origin == "start" else 1 - (1 - progress) ** self.power


@dataclasses.dataclass(frozen=True)
class LinearSchedule(_Curve):
    """Linear from `start` to `limit`, constant before and after (Pax: `Linear`).

    Attributes:
      start: First step of the line, and the factor there.
      limit: Last step, and the factor there.
    """

    pax_name = "Linear"


@dataclasses.dataclass(frozen=True)
class Exponential(_Curve):
    """Exponential from `start` to `limit`, constant before and after (Pax: the same name).

    Attributes:
      start: First step of the curve, and the factor there.
      limit: Last step, and the factor there.
    """

    start: tuple[StepNumber, PositiveFloat] = (0, 1.0)
    limit: tuple[StepNumber, PositiveFloat] = (1, 0.5)

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.start[1] * (self.limit[1] / self.start[1]) ** self.progress(step)


@dataclasses.dataclass(frozen=True)
class DelayedCosine(_Curve):
    """Half a cosine from `start` to `limit`, constant before and after (Pax: the same name).

    Attributes:
      start: First step of the curve, and the factor there.
      limit: Last step, and the factor there.
    """

    limit: Point = (1, 0.5)

    def rise(self, progress: jax.Array) -> jax.Array:
        return 0.5 * (1 - jnp.cos(math.pi * progress))


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from step 0 to `total_steps`, then constant (Pax: the same name).

    Attributes:
      initial_value: Factor at step 0.
      final_value: Factor at and after `total_steps`.
      total_steps: Last step of the curve; None = the run's `num_train_steps`.
    """

    initial_value: NonNegativeFloat = 1.0
    final_value: NonNegativeFloat = 0.0
    total_steps: Derived[Steps | None] = None

    def validate(self) -> None:
        require(self, "total_steps", self.total_steps)

    def __call__(self, step: jax.Array) -> jax.Array:
        end = require(self, "total_steps", self.total_steps)
        return DelayedCosine((0, self.initial_value), (end, self.final_value))(step)


@dataclasses.dataclass(frozen=True)
class ContinuousSchedule(Schedule):
    """Constant, then exponential decay with a half-life, down to a minimum (Pax: the same name).

    Attributes:
      initial_value: Factor before `start_step`.
      start_step: First step of the decay.
      half_life_steps: Steps in which the factor halves.
      min: Lower bound, as a fraction of `initial_value`.
    """

    initial_value: NonNegativeFloat = 1.0
    start_step: StepNumber = 400_000
    half_life_steps: Steps = 100_000
    min: Fraction = 0.01

    def __call__(self, step: jax.Array) -> jax.Array:
        halvings = jnp.maximum(step - self.start_step, 0) / self.half_life_steps
        return self.initial_value * jnp.maximum(0.5**halvings, self.min)
