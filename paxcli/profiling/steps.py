"""Traces of some steps of a run: of those asked for when it starts, or while it runs."""

from __future__ import annotations

import json
import re
import time

import jax
from etils import epath

from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.metrics.meter import peak_memory_bytes
from paxcli.profiling.summary import HLO_FILE, MEMORY_FILE
from paxcli.profiling.trace import TRACES, find_trace
from paxcli.training.instrument import Instrument
from paxcli.training.step import TrainStep

REQUEST = "request"  # a file of this name in `profile/` asks for a trace
_STEPS_ON_REQUEST = 5
_SECONDS_BETWEEN_LOOKS = 2.0


def parse_steps(text: str, num_train_steps: int) -> range:
    """`10:15` to the steps from 10 to 15.

    Raises:
      ConfigError: It is something else, or the run does not come that far.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not steps or steps[0] < 1:
        raise ConfigError(f"--profile-steps {text}: it takes the first and the last step, such as 10:15.")
    if steps[-1] > num_train_steps:
        raise ConfigError(
            f"--profile-steps {text}: the run has {num_train_steps} steps.", "Trace earlier ones, or train for longer."
        )
    return steps


class StepTracer(Instrument):
    """Traces the given steps, and, whenever the file `request` appears in the directory, the next five.

    The first process of a job alone looks and traces, so that processes need not agree and write no file twice.
    """

    def __init__(self, profile_dir: epath.Path, steps: range | None = None):
        """`profile_dir` is `RUN_DIR/profile`."""
        self._directory = profile_dir
        self._steps = steps or range(0)
        self._last = 0
        self._program: jax.stages.Compiled | None = None
        self._looked = 0.0
        self._tracing = False
        self._dispatched: dict[str, jax.Array] = {}

    def compiled(self, program: jax.stages.Compiled) -> TrainStep:
        self._program = program
        return program

    def before(self, step: int) -> None:
        if self._tracing or jax.process_index() != 0:
            return
        if step in self._steps:
            self._last = self._steps[-1]
        elif self._requested():
            self._last = step + _STEPS_ON_REQUEST - 1
        if step <= self._last:
            jax.block_until_ready(self._dispatched)  # steps before it are not part of the trace
            start_trace(self._directory)
            self._tracing = True

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._dispatched = metrics
        if self._tracing and step == self._last:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        if self._tracing:
            self._tracing = False
            place = stop_trace(self._directory, self._program)
            log.info("Traced: pax profile summarize %s", place)

    def _requested(self) -> bool:
        """Whether somebody asks for a trace. Looks rarely: the directory may be a bucket."""
        if time.monotonic() < self._looked + _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = time.monotonic()
        asked = self._directory / REQUEST
        if not asked.exists():
            return False
        asked.unlink()
        return True


def start_trace(directory: epath.Path) -> None:
    """Begins a trace for `directory/plugins/profile`, where xprof and TensorBoard look."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of a Python function would drown the rest, and slow it down
    jax.profiler.start_trace(str(directory), profiler_options=options)


def stop_trace(directory: epath.Path, program: jax.stages.Compiled | None) -> epath.Path:
    """Ends it, and puts beside it what a summary needs of the program that ran. Returns where."""
    while (directory / TRACES / time.strftime("%Y_%m_%d_%H_%M_%S")).exists():
        time.sleep(0.05)  # JAX names a trace after the second in which it ends, and writes over another of that name
    jax.profiler.stop_trace()
    place = find_trace(str(directory))
    memory = {"peak_bytes_in_use": peak_memory_bytes()}
    if program is not None:
        (place / HLO_FILE).write_text(program.as_text() or "")
        sizes = program.memory_analysis()
        for name in ("argument", "output", "temp", "alias"):
            memory[f"{name}_bytes"] = getattr(sizes, f"{name}_size_in_bytes")
    (place / MEMORY_FILE).write_text(json.dumps(memory) + "\n")
    return place
