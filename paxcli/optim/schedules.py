"""Learning-rate schedules: a factor for each step, from 0 on. The learning rate is `learning_rate * schedule(step)`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable


@dataclasses.dataclass(frozen=True)
class Schedule(Configurable):
    """A function of the step. After its end, the last value holds."""

    def __call__(self, step: jax.Array) -> jax.Array:
        """The factor of the update that leads from `step` to `step + 1`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Always 1."""

    def __call__(self, step: jax.Array) -> jax.Array:
        return jnp.ones_like(step, jnp.float32)


@dataclasses.dataclass(frozen=True)
class LinearRampupCosineDecay(Schedule):
    """Up linearly over `warmup_steps`, flat until `decay_start`, down along a cosine (Pax: the same name).

    Attributes:
      warmup_steps: Steps from 0 to 1.
      decay_start: First step of the decay; None = `warmup_steps`.
      decay_end: Last step of the decay; None = the run's `num_train_steps`.
      min_ratio: Factor at and after `decay_end`.
    """

    warmup_steps: int = 0
    decay_start: int | None = None
    decay_end: int | None = None
    min_ratio: float = 0.1

    def __call__(self, step: jax.Array) -> jax.Array:
        start = self.warmup_steps if self.decay_start is None else self.decay_start
        assert self.decay_end is not None  # the learner fills it in
        cosine = optax.cosine_decay_schedule(1.0, max(self.decay_end - start, 1), self.min_ratio)
        return _rampup(step, self.warmup_steps) * cosine(jnp.maximum(step - start, 0))


@dataclasses.dataclass(frozen=True)
class LinearRampupExponentialDecay(Schedule):
    """Up linearly over `warmup_steps`, flat until `decay_start`, down exponentially (Pax: the same name).

    Attributes:
      warmup_steps: Steps from 0 to 1.
      decay_start: First step of the decay.
      decay_end: Last step of the decay.
      min_ratio: Factor at and after `decay_end`.
    """

    warmup_steps: int = 0
    decay_start: int = 0
    decay_end: int = 1
    min_ratio: float = 0.1

    def __call__(self, step: jax.Array) -> jax.Array:
        progress = (step - self.decay_start) / max(self.decay_end - self.decay_start, 1)
        return _rampup(step, self.warmup_steps) * self.min_ratio ** jnp.clip(progress, 0.0, 1.0)


def _rampup(step: jax.Array, warmup_steps: int) -> jax.Array:
    return jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else jnp.ones_like(step, jnp.float32)
