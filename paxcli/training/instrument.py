"""How the train step of a run is compiled, and who looks on while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from paxcli.training.session import Session
from paxcli.training.step import TrainStep, make_train_step


def step_of(session: Session) -> jax.stages.Wrapped:
    """The jitted train step of a session, with the options that it is compiled with."""
    return make_train_step(session.experiment.task, session.abstract, session.compiler_options)


class Instrument:
    """Compiles the step ahead of time and measures nothing; `paxcli.profiling` has those that do.

    Attributes:
      options: Options of the compiler over those that the step has, name to value.
    """

    options: dict[str, Any] = {}

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        """Lowers the step; what is returned compiles it, in whatever thread it is called."""
        lowered = step_of(session).lower(session.abstract, session.batch)
        return lambda: self.compiled(lowered.compile(compiler_options=self.options or None))

    def compiled(self, program: jax.stages.Compiled) -> TrainStep:
        """Looks at the compiled step, and says what to call as such."""
        return program

    def before(self, step: int) -> None:
        """Step `step` is about to be dispatched."""

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Step `step` was dispatched; its metrics may not be there yet."""

    def close(self) -> None:
        """The run is over, or failed."""
