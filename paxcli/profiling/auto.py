"""`pax train --auto-pgle`: JAX's own automatic mode, for the train step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fiddle as fdl
import jax

from paxcli.nested_map import NestedMap
from paxcli.profiling.runner import require_profile_device
from paxcli.training.experiment import Experiment
from paxcli.training.instrument import Instrument, step_of
from paxcli.training.session import Session
from paxcli.training.state import TrainState
from paxcli.training.step import TrainStep


class AutoPgle(Instrument):
    """JAX profiles the first calls of the step, and compiles it again with what it found.

    A program that is compiled ahead of time is never profiled, so the jitted function is called. JAX profiles whatever
    runs while the mode is on, so it is on during these calls only. With a cache of compiled programs, a run that starts
    again finds the second program, and profiles nothing.
    """

    def __init__(self, runs: int | None, percentile: int = 90):
        """JAX profiles `runs` calls; None = none: the cache is expected to have the program from a run before."""
        self._mode = "jax_enable_pgle" if runs else "jax_compilation_cache_expect_pgle"
        jax.config.update("jax_pgle_profiling_runs", runs or 0)
        jax.config.update("jax_pgle_aggregation_percentile", percentile)

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        step = step_of(session)
        return lambda: self.around(step)

    def around(self, step: TrainStep) -> TrainStep:
        """The jitted step, with the mode on while it is called."""

        def call(state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
            with self._on():
                return step(state, batch)

        return call

    @contextmanager
    def _on(self) -> Iterator[None]:
        jax.config.update(self._mode, True)
        try:
            yield
        finally:
            jax.config.update(self._mode, False)


def auto_pgle(config: fdl.Config[Experiment], runs: int, percentile: int) -> AutoPgle:
    """JAX's automatic mode with so many profiled steps.

    Raises:
      MissingError: The devices give no profile: JAX would profile in vain, and compile again for nothing.
    """
    require_profile_device(config)
    return AutoPgle(runs, percentile)


def expected_pgle(config: fdl.Config[Experiment]) -> AutoPgle:
    """The program that such a run left in the cache. JAX warns where there is none.

    Raises:
      MissingError: The devices know no profiles.
    """
    require_profile_device(config)
    return AutoPgle(None)
