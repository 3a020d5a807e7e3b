"""`pax pgle collect`: traces steps of a recipe and writes a profile of the cost of each instruction."""

from __future__ import annotations

import tempfile
from typing import Any

import fiddle as fdl
import jax
from etils import epath
from jax.experimental import multihost_utils
from jax.experimental.profiler import get_profiled_instructions_proto

from paxcli.errors import MissingError, first_line
from paxcli.log import log
from paxcli.profiling.costs import BINARY, LIKELY_CAUSES, TEXT, aggregate, decode, describe, write_costs
from paxcli.profiling.manifest import NAME, conditions, write_manifest
from paxcli.profiling.runner import Runner, open_runner
from paxcli.profiling.steps import NO_COMMAND_BUFFERS, start_trace
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir

STEM = "profile"
COLLECT_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, **NO_COMMAND_BUFFERS}  # as in JAX's automatic mode


def collect(
    config: fdl.Config[Experiment], run_dir: RunDir, steps: int, warmup: int, percentile: int
) -> dict[str, Any] | None:
    """Traces steps one by one and writes `profile/profile.pb`, `.pbtxt` and `manifest.json`.

    Args:
      config: The recipe.
      run_dir: Run directory to write the profile to.
      steps: Number of steps to trace, at least 1.
      warmup: Number of steps to run before them.
      percentile: Of the costs of an instruction over the steps.

    Returns:
      `profile`, `text`, `manifest`, `steps`, `percentile`, `instructions`, `total_microseconds`, `fingerprints` and
      `costliest`; None on every process but process 0.

    Raises:
      MissingError: The device gives no profile, or nothing could be traced.
    """
    with open_runner(config, run_dir) as runner:
        return collect_with(runner, config, run_dir, steps, warmup, percentile)


def collect_with(
    runner: Runner, config: fdl.Config[Experiment], run_dir: RunDir, steps: int, warmup: int, percentile: int
) -> dict[str, Any] | None:
    """Does what `collect` does, with an open runner."""
    if jax.device_count() == 1:
        log.warning("One device has no collectives to hide: expect no speedup.")
    program = runner.compile(COLLECT_OPTIONS)
    runner.run(program, warmup)
    written = None
    if jax.process_index() == 0:
        profile = aggregate([_trace_step(runner, program) for _ in range(steps)], percentile)
        found = describe(decode(profile), top=10)
        run_dir.profile.mkdir(parents=True, exist_ok=True)
        stem = run_dir.profile / STEM
        write_costs(profile, stem)
        settings = {"steps": steps, "percentile": percentile, "instructions": found["instructions"]}
        write_manifest(run_dir.profile, conditions(config), settings | {"compiler_options": COLLECT_OPTIONS})
        paths = stem.with_suffix(BINARY), stem.with_suffix(TEXT), run_dir.profile / NAME
        written = dict(zip(("profile", "text", "manifest"), map(str, paths), strict=True)) | settings | found
    else:  # profilers of several processes on one machine interfere with each other
        runner.run(program, steps)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("pax pgle collect")  # the others may read what process 0 wrote
    return written


def _trace_step(runner: Runner, program: jax.stages.Compiled) -> bytes:
    """Costs of the instructions in one step, as JAX reads them from its trace; empty if it has none."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            trace = start_trace(epath.Path(directory), must_start=True)
        except RuntimeError as error:
            raise MissingError(f"The profiler failed to start: {first_line(error)}", LIKELY_CAUSES) from error
        try:
            runner.run(program, 1)
        finally:
            jax.profiler.stop_trace()
        return get_profiled_instructions_proto(str(trace))
