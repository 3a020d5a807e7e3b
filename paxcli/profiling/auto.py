"""`pax train --auto-pgle`: JAX's automatic PGLE, for the train step only."""

from __future__ import annotations

from collections.abc import Callable

import jax

from paxcli.nested_map import NestedMap
from paxcli.training.instrument import Instrument, step_of
from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep


class AutoPgle(Instrument):
    """JAX profiles the first calls of the step, and recompiles it with the profile.

    JAX never profiles a program that was compiled ahead of time, so the jitted function is called. It profiles all
    that runs while the mode is on, so the mode is on during these calls only. With a compilation cache, a restarted run
    finds the recompiled program there and does not profile.

    Args:
      runs: Number of calls to profile; None = the compilation cache is expected to have the recompiled program.
      percentile: Of the costs of an instruction over the calls.
    """

    def __init__(self, runs: int | None, percentile: int = 90):
        self._mode = "jax_enable_pgle" if runs else "jax_compilation_cache_expect_pgle"
        jax.config.update("jax_pgle_profiling_runs", runs or 0)
        jax.config.update("jax_pgle_aggregation_percentile", percentile)

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        step = step_of(session)
        return lambda: self.around(step)

    def around(self, step: TrainStep) -> TrainStep:
        """The jitted step, with the mode on during its calls."""

        def call(state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
            jax.config.update(self._mode, True)
            try:
                return step(state, batch)
            finally:
                jax.config.update(self._mode, False)

        return call
