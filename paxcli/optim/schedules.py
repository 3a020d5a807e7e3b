"""Learning-rate schedules: a factor per step, from step 0. The learning rate is `learning_rate * schedule(step)`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from paxcli.config import fields
from paxcli.config.configurable import Configurable
from paxcli.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Schedule(Configurable):
    """A function of the step. After its end, it keeps its last value."""

    def __call__(self, step: jax.Array) -> jax.Array:
        """The factor of the update from `step` to `step + 1`."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raises a ConfigError when fields contradict each other."""


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Always 1."""

    def __call__(self, step: jax.Array) -> jax.Array:
        return jnp.ones_like(step, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _RampupAndDecay(Schedule):
    """Linear warmup to `max`, constant until `decay_start`, then decay to `min_ratio` of it."""

    warmup_steps: fields.StepNumber = 0
    decay_start: fields.StepNumber | None = None
    decay_end: fields.Derived[fields.Steps | None] = None
    min_ratio: fields.Fraction = 0.1
    max: fields.PositiveFloat = 1.0

    def validate(self) -> None:
        require(self, "decay_end", self.decay_end)
        check_order(self, [self.warmup_steps, self.decay_start, self.decay_end])

    def progress(self, step: jax.Array) -> jax.Array:
        """The fraction of the decay's steps that are done, from 0 to 1."""
        end = require(self, "decay_end", self.decay_end)
        start = min(self.warmup_steps if self.decay_start is None else self.decay_start, end - 1)
        return jnp.clip((step - start) / (end - start), 0.0, 1.0)

    def rampup(self, step: jax.Array) -> jax.Array:
        """The factor without the decay."""
        return self.max * jnp.minimum(step / self.warmup_steps if self.warmup_steps else 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class LinearRampupCosineDecay(_RampupAndDecay):
    """Linear warmup, constant until `decay_start`, then cosine decay (Pax: the same name).

    Attributes:
      warmup_steps: Steps of the warmup from 0 to `max`.
      decay_start: First step of the decay; None = `warmup_steps`.
      decay_end: Last step of the decay; None = the end of the run.
      min_ratio: Factor at and after `decay_end`, as a fraction of `max`.
      max: Largest factor: that between warmup and decay.
      start_step: The factor is 1 before this step, from which the other steps count.
    """

    start_step: fields.StepNumber = 0

    def __call__(self, step: jax.Array) -> jax.Array:
        after = step - self.start_step
        cosine = optax.cosine_decay_schedule(1.0, 1, self.min_ratio)(self.progress(after))
        return jnp.where(after < 0, 1.0, self.rampup(after) * cosine)


@dataclasses.dataclass(frozen=True)
class LinearRampupExponentialDecay(_RampupAndDecay):
    """Linear warmup, constant until `decay_start`, then exponential decay (Pax: the same name).

    Attributes:
      warmup_steps: Steps of the warmup from 0 to `max`.
      decay_start: First step of the decay; None = `warmup_steps`.
      decay_end: Last step of the decay; None = the run's `num_train_steps`.
      min_ratio: Factor at and after `decay_end`, as a fraction of `max`; above 0, which an exponential never reaches.
      max: Largest factor: that between warmup and decay.
    """

    min_ratio: fields.PositiveFraction = 0.1

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.rampup(step) * self.min_ratio ** self.progress(step)


@dataclasses.dataclass(frozen=True)
class LinearRampupPolynomialDecay(_RampupAndDecay):
    """Linear warmup, constant until `decay_start`, then polynomial decay (Pax: the same name).

    Attributes:
      warmup_steps: Steps of the warmup from 0 to `max`.
      decay_start: First step of the decay; None = `warmup_steps`.
      decay_end: Last step of the decay; None = the run's `num_train_steps`.
      min_ratio: Factor at and after `decay_end`, as a fraction of `max`.
      max: Largest factor: that between warmup and decay.
      power: Exponent: the factor falls with (fraction of the decay steps) ** power.
    """

    power: fields.PositiveFloat = 1.0

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.rampup(step) * (1 - (1 - self.min_ratio) * self.progress(step) ** self.power)


@dataclasses.dataclass(frozen=True)
class LinearRampupSqrtDecay(Schedule):
    """Linear warmup to `peak`, then decay with the inverse square root of the step (Pax: the same name).

    Attributes:
      peak: Factor at `warmup_steps`.
      warmup_steps: Steps of the warmup. Step 0 has the factor of step 1.
    """

    peak: fields.NonNegativeFloat = 1.0
    warmup_steps: fields.Steps = 4000

    def __call__(self, step: jax.Array) -> jax.Array:
        share = jnp.maximum(step, 1) / self.warmup_steps
        return self.peak * jnp.minimum(share, share**-0.5)


@dataclasses.dataclass(frozen=True)
class SqrtDecay(Schedule):
    """The inverse square root of the step, constant at first (Pax: the same name).

    Attributes:
      decay_start: The factor is constant until this step.
      multiplier: Multiplies the factor.
      offset: Subtracted from the step.
    """

    decay_start: fields.Steps = 10_000
    multiplier: fields.NonNegativeFloat = 1.0
    offset: Annotated[fields.AnyFloat, fields.Unit("steps")] = 0.0

    def __call__(self, step: jax.Array) -> jax.Array:
        return self.multiplier * jax.lax.rsqrt(jnp.maximum(step - self.offset, float(self.decay_start)))


@dataclasses.dataclass(frozen=True)
class NoamSchedule(Schedule):
    """Linear warmup, then decay with the inverse square root of the step, both scaled by 1 / sqrt(width).

    Vaswani et al., 2017, who trained the first Transformers with it; named for Noam Shazeer. Pax: `Transformer`.

    Attributes:
      warmup_steps: Steps of the warmup, for one worker.
      model_dim: Width of the model: the factor is scaled by 1 / sqrt(`model_dim`).
      worker_replicas: Multiplies the length of the warmup.
      decay_end: The factor is constant from this step; None = the run's `num_train_steps`.
    """

    pax_name = "Transformer"

    warmup_steps: fields.Steps = 4000
    model_dim: fields.PositiveInt = 512
    worker_replicas: fields.PositiveInt = 1
    decay_end: fields.Derived[fields.Steps | None] = None

    def validate(self) -> None:
        check_order(self, [self.warmup_steps * self.worker_replicas, self.decay_end])

    def __call__(self, step: jax.Array) -> jax.Array:
        update = 1 + (step if self.decay_end is None else jnp.minimum(step, self.decay_end))
        rising = update * float(self.warmup_steps * self.worker_replicas) ** -1.5
        return self.model_dim**-0.5 * jnp.minimum(rising, jax.lax.rsqrt(jnp.asarray(update, jnp.float32)))


def check_order(schedule: Schedule, steps: list[int | None]) -> None:
    """Raises a ConfigError if the ends of warmup and decay are not in order; None = there is none."""
    given = [step for step in steps if step is not None]
    if given != sorted(given):
        problem = f"{type(schedule).__name__}: the warmup's end, `decay_start` and `decay_end` must rise, not {given}."
        raise ConfigError(problem, "Correct these steps.")


def require(schedule: Schedule, field: str, value: int | None) -> int:
    """The value of a field that the experiment fills in, except in schedules that are part of another schedule."""
    if value is None:
        raise ConfigError(f"{type(schedule).__name__} inside another schedule has no `{field}`.", "Give it one.")
    return value
