"""Runs a recipe's train step for a few steps, only to measure it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import fiddle as fdl
import jax
from jax.profiler import StepTraceAnnotation

from paxcli.errors import DataError, MissingError
from paxcli.layers.scopes import TRAIN_PHASE
from paxcli.mesh.sharding import put_batch
from paxcli.training.experiment import Experiment
from paxcli.training.instrument import step_of
from paxcli.training.out_of_memory import explain_out_of_memory
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session, build_session
from paxcli.training.validate import validate


class Runner:
    """Runs steps of a recipe from newly initialized parameters. All programs update the same state."""

    def __init__(self, session: Session):
        self._session = session
        self._state = None
        self._steps = 0

    def compile(self, options: Mapping[str, Any]) -> jax.stages.Compiled:
        """Compiles the train step ahead of time, with compiler options that override those of training."""
        session = self._session
        return step_of(session).lower(session.abstract, session.batch).compile(compiler_options=dict(options) or None)

    def run(self, program: jax.stages.Compiled, steps: int) -> list[float]:
        """Runs steps one by one, and returns the seconds of each.

        Raises:
          DataError: The training data ended.
        """
        session = self._session
        if self._state is None:
            self._state = session.new_state()
        seconds = []
        for _ in range(steps):
            try:
                rows = session.experiment.train_input.get_next()
            except StopIteration:
                raise DataError(f"The training data ended after {self._steps} steps.", "Profile fewer steps.") from None
            batch = jax.block_until_ready(put_batch(rows, session.mesh))
            began = time.perf_counter()
            with StepTraceAnnotation(TRAIN_PHASE, step_num=self._steps):
                self._state, metrics = program(self._state, batch)
                jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - began)
            self._steps += 1
        return seconds


@contextlib.contextmanager
def open_runner(config: fdl.Config[Experiment], run_dir: RunDir) -> Iterator[Runner]:
    """Opens a runner on this machine's devices. Locks the run directory, and writes only to its `profile/`.

    Raises:
      ConfigError: The recipe is invalid, or does not fit the devices.
      MissingError: The devices give no profile.
    """
    require_profile_device(config)
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            run_dir.create()
            stack.enter_context(run_dir.lock())
        session = stack.enter_context(build_session(config).active())
        stack.enter_context(explain_out_of_memory(session, run_dir.profile))
        session.experiment.train_input.check_data()
        yield Runner(session)


def require_profile_device(config: fdl.Config[Experiment]) -> None:
    """Validates the recipe, starts the devices, and checks that they support profile-guided scheduling.

    Raises:
      ConfigError: The recipe is invalid.
      MissingError: The devices give no profile: XLA reads costs of instructions on NVIDIA GPUs only.
    """
    validate(config)
    fdl.build(config.mesh).start_processes()
    device = jax.devices()[0]
    if device.platform != "gpu":
        problem = f"This device ({device.device_kind}) gives no profile: profile-guided scheduling is for NVIDIA GPUs."
        hint = "Run it on a machine with an NVIDIA GPU. `pax train RECIPE --profile-steps 10:15` traces on any device."
        raise MissingError(problem, hint)
