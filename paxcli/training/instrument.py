"""Compiles the train step and observes it: tracing, profiling, precompiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep, make_train_step


def step_of(session: Session) -> jax.stages.Wrapped:
    """The jitted train step of a session, with its compiler options."""
    return make_train_step(session.experiment.task, session.abstract, session.compiler_options)


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """A program of a run, before it is compiled.

    Attributes:
      name: Which one.
      lower: Lowers it.
      arguments: Its arguments, or their shapes.
      options: Compiler options that override its own, name → value.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Programs:
    """Compiles the programs of a run. A subclass may have them from an earlier run."""

    def prepare(self, session: Session, program: ProgramSpec) -> Callable[[], jax.stages.Compiled]:
        """Lowers a program. The function that it returns compiles it, and may be called in another thread."""
        lowered = program.lower()
        return lambda: lowered.compile(compiler_options=program.options or None)

    def prepare_step(self, session: Session, options: dict[str, Any]) -> Callable[[], jax.stages.Compiled]:
        """`prepare` of the train step, with compiler options that override its own."""
        arguments = (session.abstract, session.batch)
        return self.prepare(
            session, ProgramSpec("step", lambda: step_of(session).lower(*arguments), arguments, options)
        )

    def new_state(self, session: Session) -> TrainState:
        """A new training state."""
        arguments = (session.seed,)
        init = ProgramSpec("state", lambda: session.jit_init().lower(*arguments), arguments, {})
        return session.new_state(self.prepare(session, init)())


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
