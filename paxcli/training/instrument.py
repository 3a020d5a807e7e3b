"""Compiles the train step and observes it: tracing, profiling, precompiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from paxcli.training.session import Session
from paxcli.training.step import TrainStep, make_train_step

PrepareStep = Callable[[Session], Callable[[], jax.stages.Compiled]]
"""Lowers the train step of a session. The function that it returns compiles it, and may be called in another thread."""


def step_of(session: Session) -> jax.stages.Wrapped:
    """The jitted train step of a session, with its compiler options."""
    return make_train_step(session.experiment.task, session.abstract, session.compiler_options)


class Instrument:
    """Compiles the train step ahead of time and observes nothing. Subclasses trace, profile, or load a compiled step.

    Attributes:
      options: Compiler options that override those of the step, name → value.
    """

    options: dict[str, Any] = {}

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        """Lowers the step. The function that it returns compiles it, and may be called in another thread."""
        lowered = step_of(session).lower(session.abstract, session.batch)
        return lambda: self.wrap_step(lowered.compile(compiler_options=self.options or None))

    def wrap_step(self, program: jax.stages.Compiled) -> TrainStep:
        """Receives the compiled step; returns the function to call as the step."""
        return program

    def before(self, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Called after step `step` is dispatched; its metrics may still be computed."""

    def close(self) -> None:
        """Called at the end of the run, also when it failed."""
