"""Traces steps of a training run, chosen when it starts or requested while it runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import jax
from etils import epath

from paxcli.config.paths import replace_text
from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.metrics.meter import peak_memory_bytes
from paxcli.profiling.summary import HLO_FILE, MEMORY_FILE
from paxcli.profiling.trace import TRACES
from paxcli.training.instrument import CompiledProgram, Instrument, Programs
from paxcli.training.session import Session
from paxcli.training.step import TrainStep

REQUEST = "request"  # a file with this name in `profile/` requests a trace
# A command buffer (CUDA graph) hides from the profiler which instruction each of its kernels is.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
_STEPS_ON_REQUEST = 5
_SECONDS_BETWEEN_CHECKS = 2.0


def parse_steps(text: str, num_train_steps: int | None) -> range:
    """Parses `10:15`, the steps from 10 to 15, of a run of so many steps; None = not known yet.

    Raises:
      ConfigError: The text has another form, or the run has fewer steps.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not steps or steps[0] < 1:
        hint = "Give the first and the last step, such as 10:15."
        raise ConfigError(f"--profile-steps {text} is not a range of steps.", hint)
    if num_train_steps is not None and steps[-1] > num_train_steps:
        hint = "Trace earlier ones, or train for longer."
        raise ConfigError(f"--profile-steps {text}: the run has {num_train_steps} steps.", hint)
    return steps


class StepTracer(Instrument):
    """Traces the given steps, and the next five whenever the file `request` appears in the directory.

    Only process 0 checks and traces, so processes need not agree and no file is written twice. With given steps, a run
    on GPUs has no command buffers.

    Args:
      profile_dir: `RUN_DIR/profile`.
      steps: Steps to trace; None = only on request.
      programs: Compiles the step; None = as every `Instrument` does.
    """

    def __init__(self, profile_dir: epath.Path, steps: range | None = None, programs: Programs | None = None):
        self._directory = profile_dir
        self.programs = programs or self.programs
        self._steps = steps or range(0)
        self._last = 0
        self._program: CompiledProgram | None = None
        self._checked_at = 0.0
        self._trace: epath.Path | None = None  # that is being made
        self._dispatched: dict[str, jax.Array] = {}

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        if self._steps:  # a run of epochs knows by now how many it has
            parse_steps(f"{self._steps[0]}:{self._steps[-1]}", session.config.task.train.num_train_steps)
        if self._steps and session.mesh.devices.flat[0].platform == "gpu":
            self.options = NO_COMMAND_BUFFERS
        return super().prepare(session)

    def wrap_step(self, program: CompiledProgram) -> TrainStep:
        self._program = program
        return program

    def before(self, step: int) -> None:
        if self._trace or jax.process_index() != 0:
            return
        if self._steps and not self._dispatched and step > self._steps[-1]:
            log.warning("--profile-steps traces nothing: the run resumed after step %d.", self._steps[-1])
        if step in self._steps:
            self._last = self._steps[-1]
        elif self._is_requested():
            self._last = step + _STEPS_ON_REQUEST - 1
        if step <= self._last:
            jax.block_until_ready(self._dispatched)  # keep earlier steps out of the trace
            self._trace = start_trace(self._directory)

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._dispatched = metrics
        if self._trace and step == self._last:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self._trace:
            trace, self._trace = self._trace, None
            stop_trace(trace, self._program)
            log.info("Traced: pax profile summarize %s", trace)

    def _is_requested(self) -> bool:
        """Whether a trace is requested. Checks rarely, since the directory may be in a bucket."""
        if time.monotonic() < self._checked_at + _SECONDS_BETWEEN_CHECKS:
            return False
        self._checked_at = time.monotonic()
        request = self._directory / REQUEST
        if not request.exists():
            return False
        request.unlink()
        return True


def start_trace(directory: epath.Path, must_start: bool = False) -> epath.Path:
    """Starts a trace below `directory/plugins/profile`, where xprof and TensorBoard look; returns its directory.

    It is named for the time in UTC, so that the newest is the last by name after a change of the time zone too.

    Raises:
      RuntimeError: `must_start` is set, and another profiler is using the device.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would slow the run down and swamp the trace
    while (trace := directory / TRACES / time.strftime("%Y_%m_%d_%H_%M_%S", time.gmtime())).exists():
        time.sleep(0.05)  # JAX overwrites a trace with the same name
    options.session_id, options.raise_error_on_start_failure = trace.name, must_start
    jax.profiler.start_trace(str(directory), profiler_options=options)
    return trace


def stop_trace(trace: epath.Path, program: CompiledProgram | None) -> None:
    """Stops the trace, and writes what a summary needs of the program beside it."""
    jax.profiler.stop_trace()
    memory = {"peak_bytes_in_use": peak_memory_bytes()}
    if program is not None:
        replace_text(trace / HLO_FILE, program.as_text() or "")
        sizes = program.memory_analysis()
        for name in ("argument", "output", "temp", "alias"):
            memory[f"{name}_bytes"] = getattr(sizes, f"{name}_size_in_bytes")
    replace_text(trace / MEMORY_FILE, json.dumps(memory) + "\n")
