"""Compiles the train step and observes it: tracing, profiling, precompiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep, make_train_step


def step_of(session: Session) -> jax.stages.Wrapped:
    """The jitted train step of a session, with its compiler options."""
    return make_train_step(session.experiment.task, session.abstract, session.compiler_options)


class Programs:
    """Compiles the programs of a run. A subclass may have them from an earlier run."""

    def prepare_step(self, session: Session, options: dict[str, Any]) -> Callable[[], jax.stages.Compiled]:
        """Lowers the train step. The function that it returns compiles it, and may be called in another thread.

        Args:
          session: The run's.
          options: Compiler options that override those of the step, name → value.
        """
        lowered = step_of(session).lower(session.abstract, session.batch)
        return lambda: lowered.compile(compiler_options=options or None)

    def new_state(self, session: Session) -> TrainState:
        """A new training state."""
        return session.new_state()


class Instrument:
    """Compiles the train step ahead of time and observes nothing. Subclasses trace, profile, or load a compiled step.

    Attributes:
      options: Compiler options that override those of the step, name → value.
      programs: Compiles the step.
    """

    options: dict[str, Any] = {}
    programs: Programs = Programs()

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        """Lowers the step. The function that it returns compiles it, and may be called in another thread."""
        compile_step = self.programs.prepare_step(session, self.options)
        return lambda: self.wrap_step(compile_step())

    def wrap_step(self, program: jax.stages.Compiled) -> TrainStep:
        """Receives the compiled step; returns the function to call as the step."""
        return program

    def before(self, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Called after step `step` is dispatched; its metrics may still be computed."""

    def close(self) -> None:
        """Called at the end of the run, also when it failed."""
