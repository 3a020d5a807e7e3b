"""Compiles the train step and observes it: tracing, profiling, precompiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep, make_train_step


def step_of(session: Session) -> jax.stages.Wrapped:
    """The jitted train step of a session, with its compiler options."""
    return make_train_step(session.experiment.task, session.abstract, session.compiler_options)


class CompiledProgram(Protocol):
    """A program that is ready to run, as `jax.stages.Compiled` is."""

    def __call__(self, *arguments: Any) -> Any: ...

    def as_text(self) -> str | None:
        """The program after XLA's optimizations."""

    def memory_analysis(self) -> Any:
        """Bytes of arguments, results and temporary arrays on a device."""


class ProgramSpec(NamedTuple):
    """A program of a run, before it is compiled.

    Attributes:
      name: Which one.
      lower: Lowers it.
      options: Compiler options that override its own, name → value.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    options: dict[str, Any]


class Programs:
    """Compiles the programs of a run. A subclass may have them from an earlier run."""

    def prepare(self, session: Session, program: ProgramSpec) -> Callable[[], CompiledProgram]:
        """Lowers a program. The function that it returns compiles it, and may be called in another thread."""
        lowered = program.lower()
        return lambda: lowered.compile(compiler_options=program.options or None)

    def prepare_state(self, session: Session) -> Callable[[], TrainState]:
        """Lowers a new state. The function that it returns creates it, and may be called in another thread."""
        compile_init = self.prepare(session, ProgramSpec("state", lambda: session.jit_init().lower(session.seed), {}))
        return lambda: session.new_state(compile_init())


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
        step = ProgramSpec("step", lambda: step_of(session).lower(session.abstract, session.batch), self.options)
        compile_step = self.programs.prepare(session, step)
        return lambda: self.wrap_step(compile_step())

    def wrap_step(self, program: CompiledProgram) -> TrainStep:
        """Receives the compiled step; returns the function to call as the step."""
        return program

    def before(self, step: int) -> None:
        """Called before step `step` is dispatched."""

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Called after step `step` is dispatched; its metrics may still be computed."""

    def close(self) -> None:
        """Called at the end of the run, also when it failed."""
