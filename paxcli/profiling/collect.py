"""`pax pgle collect`: from traced steps of a recipe to a profile of what each instruction costs."""

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
from paxcli.profiling.trace import TRACES
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir

STEM = "profile"
# As JAX's automatic mode does: a command buffer hides the kernels in it from the profiler.
COLLECT_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_command_buffer": ""}


def collect(
    config: fdl.Config[Experiment], run_dir: RunDir, steps: int, warmup: int, percentile: int
) -> dict[str, Any] | None:
    """Traces steps one by one and writes `profile/profile.pb`, `.pbtxt` and `manifest.json`.

    Args:
      config: The resolved recipe.
      run_dir: Of the run that the profile is for.
      steps: How many are traced, at least 1.
      warmup: How many run before them.
      percentile: Of the costs of an instruction over the steps.

    Returns:
      `profile`, `text`, `manifest`, `steps`, `percentile`, `instructions`, `total_microseconds`, `fingerprints` and
      `costliest`; None in any process but the first.

    Raises:
      MissingError: The device gives no profile, or nothing could be traced.
    """
    with open_runner(config, run_dir) as runner:
        return collect_with(runner, config, run_dir, steps, warmup, percentile)


def collect_with(
    runner: Runner, config: fdl.Config[Experiment], run_dir: RunDir, steps: int, warmup: int, percentile: int
) -> dict[str, Any] | None:
    """The same with a runner that is open."""
    if jax.device_count() == 1:
        log.warning("One device has no collectives to hide: expect no gain.")
    program = runner.compile(COLLECT_OPTIONS)
    runner.run(program, warmup)
    written = _write(runner, program, config, run_dir, steps, percentile)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("pax pgle collect")  # the others may read what the first has written
    return written


def _write(
    runner: Runner,
    program: jax.stages.Compiled,
    config: fdl.Config[Experiment],
    run_dir: RunDir,
    steps: int,
    percentile: int,
) -> dict[str, Any] | None:
    if jax.process_index() != 0:  # the profilers of several processes of one machine disturb each other
        runner.run(program, steps)
        return None
    profile = aggregate([_traced(runner, program) for _ in range(steps)], percentile)
    found = describe(decode(profile), top=10)
    run_dir.profile.mkdir(parents=True, exist_ok=True)
    stem = run_dir.profile / STEM
    write_costs(profile, stem)
    how = {"steps": steps, "percentile": percentile, "instructions": found["instructions"]}
    write_manifest(run_dir.profile, conditions(config), how | {"compiler_options": COLLECT_OPTIONS})
    files = {"profile": stem.with_suffix(BINARY), "text": stem.with_suffix(TEXT), "manifest": run_dir.profile / NAME}
    return {**{name: str(path) for name, path in files.items()}, **how, **found}


def _traced(runner: Runner, program: jax.stages.Compiled) -> bytes:
    """The costs of the instructions in one step, as JAX reads them out of its trace; empty when it has none."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.raise_error_on_start_failure = True
    with tempfile.TemporaryDirectory() as place:
        try:
            jax.profiler.start_trace(place, profiler_options=options)
        except RuntimeError as error:
            raise MissingError(f"The profiler does not start: {first_line(error)}", LIKELY_CAUSES) from error
        try:
            runner.run(program, 1)
        finally:
            jax.profiler.stop_trace()
        (traced,) = (epath.Path(place) / TRACES).iterdir()
        return get_profiled_instructions_proto(str(traced))
