"""`pax pgle-profile`: collects a profile, and compares the step time with it and without it."""

from __future__ import annotations

import statistics
from typing import Any

import fiddle as fdl
import jax
from etils import epath

from paxcli.profiling.apply import compile_with_costs, load_costs, profile_options, require_same_program
from paxcli.profiling.collect import collect_with
from paxcli.profiling.runner import Runner, open_runner
from paxcli.profiling.steps import start_trace, stop_trace
from paxcli.profiling.summary import summarize
from paxcli.profiling.xla_log import XlaLog
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir

_ROUNDS = 5


def compare(
    config: fdl.Config[Experiment], run_dir: RunDir, steps: int, warmup: int, percentile: int, xla_log: XlaLog
) -> dict[str, Any] | None:
    """Collects a profile, then alternates rounds of `steps` steps without it and with it, on one state.

    The arguments are those of `collect`, and a log that captures what the compiler writes.

    Returns:
      What `collect` returns; for `before` and `after` the `median_step_seconds`, the number of `steps` measured, the
      share of `exposed_communication` in a trace, and the `trace`; and `speedup`. None on every process but process 0.

    Raises:
      MissingError: The device gives no profile.
      DataError: XLA did not use the profile.
    """
    with open_runner(config, run_dir) as runner:
        collected = collect_with(runner, config, run_dir, steps, warmup, percentile)
        costs = load_costs(config, run_dir)
        after = compile_with_costs(costs, xla_log, lambda: runner.compile(profile_options(costs)))
        require_same_program(after.as_text() or "", costs)
        programs = {"before": runner.compile({}), "after": after}
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for program in programs.values():
            runner.run(program, warmup)
        for _ in range(_ROUNDS):
            for name, program in programs.items():
                seconds[name] += runner.run(program, steps)
        traces = {name: _trace(runner, program, steps, run_dir.profile / name) for name, program in programs.items()}
    if collected is None:
        return None
    measured = {
        name: {"median_step_seconds": statistics.median(seconds[name]), "steps": len(seconds[name]), **traces[name]}
        for name in programs
    }
    speedup = measured["before"]["median_step_seconds"] / measured["after"]["median_step_seconds"]
    return {**collected, **measured, "speedup": speedup}


def _trace(runner: Runner, program: jax.stages.Compiled, steps: int, directory: epath.Path) -> dict[str, Any]:
    if jax.process_index() != 0:
        runner.run(program, steps)
        return {}
    trace = start_trace(directory)
    try:
        runner.run(program, steps)
    finally:
        stop_trace(trace, program)
    return {"exposed_communication": summarize(str(trace))["shares"]["collective"], "trace": str(trace)}
