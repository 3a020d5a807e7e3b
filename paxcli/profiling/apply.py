"""`pax pgle apply`: trains with a step that XLA scheduled by a profile, and verifies that it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import fiddle as fdl

from paxcli.errors import DataError
from paxcli.log import log
from paxcli.profiling.collect import STEM
from paxcli.profiling.costs import BINARY, encode, fingerprints, read_costs
from paxcli.profiling.manifest import COLLECT_AGAIN, conditions, require_fresh
from paxcli.profiling.runner import require_profile_device
from paxcli.profiling.steps import StepTracer
from paxcli.profiling.xla_log import XlaLog
from paxcli.programs.hlo import read_fingerprint
from paxcli.programs.program_cache import cache_hits
from paxcli.training.experiment import Experiment
from paxcli.training.instrument import CompiledProgram
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session
from paxcli.training.step import TrainStep

CompiledT = TypeVar("CompiledT")


class ProfileGuided(StepTracer):
    """Compiles the step with a profile.

    XLA gets the costs, not the path of their file: the file may be in a bucket, and the key of JAX's compilation cache
    would depend on its name only.
    """

    def __init__(self, run_dir: RunDir, costs: dict[str, float], xla_log: XlaLog):
        super().__init__(run_dir.profile)
        self._costs, self._xla_log = costs, xla_log
        self.options = profile_options(costs)

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        compiled = super().prepare(session)
        return lambda: compile_with_costs(self._costs, self._xla_log, compiled)

    def wrap_step(self, program: CompiledProgram) -> TrainStep:
        require_same_program(program.as_text() or "", self._costs)
        return super().wrap_step(program)


def profile_options(costs: dict[str, float]) -> dict[str, Any]:
    """Compiler options that make XLA schedule by these costs."""
    return {"xla_gpu_enable_latency_hiding_scheduler": True, "fdo_profile": encode(costs)}


def open_profile(config: fdl.Config[Experiment], run_dir: RunDir, xla_log: XlaLog) -> ProfileGuided:
    """Trains a recipe with the profile of its run directory.

    Args:
      config: The recipe.
      run_dir: Holds the profile.
      xla_log: Captures what the compiler logs.

    Raises:
      MissingError: The devices do not support profile-guided scheduling.
      DataError: There is no profile, or it was made under other conditions.
    """
    require_profile_device(config)
    return ProfileGuided(run_dir, load_costs(config, run_dir), xla_log)


def load_costs(config: fdl.Config[Experiment], run_dir: RunDir) -> dict[str, float]:
    """Loads the costs of a run directory.

    Raises:
      DataError: There are none, or they were measured under other conditions; names what differs.
    """
    require_fresh(run_dir.profile, conditions(config))
    return read_costs((run_dir.profile / STEM).with_suffix(BINARY))


def compile_with_costs(costs: dict[str, float], xla_log: XlaLog, compile_step: Callable[[], CompiledT]) -> CompiledT:
    """Compiles in this thread, and verifies that XLA scheduled by the profile.

    Raises:
      DataError: XLA's log does not report it, and the program was not in the compilation cache.
    """
    with cache_hits() as hits:
        program = compile_step()
    if hits:  # the key of the cache depends on the costs
        log.info("XLA scheduled by the costs of %d instructions; the program is from the cache.", len(costs))
        return program
    used = xla_log.wait_for("Using PGLE profile")
    if used is None:
        hint = "Collect it again with this version: `pax pgle collect RECIPE`."
        raise DataError("XLA did not use the profile: its log does not report it.", hint)
    log.info("XLA schedules by the costs of %d instructions: %s", len(costs), used.partition("] ")[2] or used)
    return program


def require_same_program(hlo_text: str, costs: dict[str, float]) -> None:
    """Checks that the costs belong to this program. XLA ignores those of another program silently.

    Raises:
      DataError: They belong to another program.
    """
    compiled, profiled = read_fingerprint(hlo_text), fingerprints(costs)
    if compiled and profiled and compiled not in profiled:
        problem = f"The profile is of program {', '.join(sorted(profiled))}; this recipe compiles to {compiled}."
        cause = "Something outside the manifest changed, such as the kernels that XLA's autotuning chose."
        raise DataError(problem, f"{cause} {COLLECT_AGAIN}")
