"""Piecewise schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from paxcli.config.fields import NonNegativeFloat, Steps
from paxcli.errors import ConfigError
from paxcli.optim.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class PiecewiseConstant(Schedule):
    """A sequence of constant factors (Pax: the same name).

    Attributes:
      boundaries: Steps at which the next factor starts.
      values: The factors, one more than `boundaries`.
    """

    boundaries: tuple[Steps, ...] = ()
    values: tuple[NonNegativeFloat, ...] = (1.0,)

    def validate(self) -> None:
        _check_pieces(self, "boundaries", "values", more=1)

    def __call__(self, step: jax.Array) -> jax.Array:
        return jnp.asarray(self.values, jnp.float32)[jnp.sum(step >= jnp.asarray(self.boundaries, jnp.int32))]


@dataclasses.dataclass(frozen=True)
class LinearRampupPiecewiseConstant(Schedule):
    """Linear warmup to the first factor at the first boundary, then constant factors (Pax: the same name).

    Attributes:
      boundaries: Steps at which a factor starts; the first ends the warmup.
      values: The factors, as many as `boundaries`.
    """

    boundaries: tuple[Steps, ...] = (1,)
    values: tuple[NonNegativeFloat, ...] = (1.0,)

    def validate(self) -> None:
        _check_pieces(self, "boundaries", "values")

    def __call__(self, step: jax.Array) -> jax.Array:
        return jnp.minimum(step / self.boundaries[0], 1.0) * PiecewiseConstant(self.boundaries[1:], self.values)(step)


@dataclasses.dataclass(frozen=True)
class PiecewiseSchedule(Schedule):
    """A sequence of schedules, each of which counts steps from its own start (Pax: the same name).

    Attributes:
      boundaries: Steps at which the next schedule starts.
      schedules: The schedules, one more than `boundaries`.
    """

    boundaries: tuple[Steps, ...] = ()
    schedules: tuple[Schedule, ...] = ()

    def validate(self) -> None:
        _check_pieces(self, "boundaries", "schedules", more=1)

    def __call__(self, step: jax.Array) -> jax.Array:
        return optax.join_schedules(self.schedules, self.boundaries)(step)  # pyrefly: ignore


@dataclasses.dataclass(frozen=True)
class CycleSchedule(Schedule):
    """Cycles through several schedules, each of which gets the step of the run (Pax: the same name).

    Attributes:
      schedules: The schedules.
      steps: How many steps each schedule runs before the next.
    """

    schedules: tuple[Schedule, ...] = ()
    steps: tuple[Steps, ...] = ()

    def validate(self) -> None:
        _check_pieces(self, "steps", "schedules")

    def __call__(self, step: jax.Array) -> jax.Array:
        ends = jnp.cumsum(jnp.asarray(self.steps, jnp.int32))
        return jnp.stack([schedule(step) for schedule in self.schedules])[jnp.sum(step % ends[-1] >= ends)]


def _check_pieces(schedule: Schedule, edges: str, pieces: str, more: int = 0) -> None:
    """Validates field `pieces`, which has `more` items than field `edges`, and at least one; `boundaries` rise."""
    name, values, found = type(schedule).__name__, list(getattr(schedule, edges)), getattr(schedule, pieces)
    count = len(values) + more
    if len(found) != count:
        hint = "Add or remove items."
        raise ConfigError(f"{name}: `{pieces}` has {len(found)} items; with {values} it must have {count}.", hint)
    if not count:
        raise ConfigError(f"{name}: `{edges}` is empty.", f"Give one number of steps for each of `{pieces}`.")
    if edges == "boundaries" and values != sorted({*values}):
        raise ConfigError(f"{name}: `boundaries` {values} must rise.", "Write them in rising order.")
    for piece in found:
        if isinstance(piece, Schedule):
            piece.validate()
