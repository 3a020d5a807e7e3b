"""`pax pgle apply`: a train step that XLA schedules by a profile, and proof that it did."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fiddle as fdl
import jax
from jax import monitoring

from paxcli.errors import DataError
from paxcli.log import log
from paxcli.profiling.collect import STEM
from paxcli.profiling.costs import BINARY, encode, fingerprints, read_costs
from paxcli.profiling.manifest import conditions, require_fresh
from paxcli.profiling.runner import require_profile_device
from paxcli.profiling.steps import StepTracer
from paxcli.profiling.xla_log import XlaLog
from paxcli.programs.instruction_names import fingerprint
from paxcli.training.experiment import Experiment
from paxcli.training.run_dir import RunDir
from paxcli.training.session import Session
from paxcli.training.step import TrainStep

Program = TypeVar("Program")

_USED = "Using PGLE profile"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Profiled(StepTracer):
    """Compiles the step with a profile.

    XLA gets the costs themselves and not the path of a file, which may be in a bucket, and of which a cache of compiled
    programs would see the name alone.
    """

    def __init__(self, run_dir: RunDir, costs: dict[str, float], xla_log: XlaLog):
        super().__init__(run_dir.profile)
        self._costs, self._xla_log = costs, xla_log
        self.options = profile_options(costs)

    def prepare(self, session: Session) -> Callable[[], TrainStep]:
        compiled = super().prepare(session)
        return lambda: compiled_with(self._costs, self._xla_log, compiled)

    def compiled(self, program: jax.stages.Compiled) -> TrainStep:
        require_same_program(program.as_text() or "", self._costs)
        return super().compiled(program)


def profile_options(costs: dict[str, float]) -> dict[str, Any]:
    """Options of the compiler that make it schedule by these costs."""
    return {"xla_gpu_enable_latency_hiding_scheduler": True, "fdo_profile": encode(costs)}


def open_profile(config: fdl.Config[Experiment], run_dir: RunDir, xla_log: XlaLog) -> Profiled:
    """The profile of a run directory, to train the recipe with. The log is one that hears the compiler.

    Raises:
      MissingError: The devices know no profiles.
      DataError: There is none, or it was made under other conditions.
    """
    require_profile_device(config)
    return Profiled(run_dir, load_costs(config, run_dir), xla_log)


def load_costs(config: fdl.Config[Experiment], run_dir: RunDir) -> dict[str, float]:
    """The costs in a run directory, if they hold here and now.

    Raises:
      DataError: There are none, or they were measured under other conditions, which it names.
    """
    require_fresh(run_dir.profile, conditions(config))
    return read_costs((run_dir.profile / STEM).with_suffix(BINARY))


def compiled_with(costs: dict[str, float], xla_log: XlaLog, compiled: Callable[[], Program]) -> Program:
    """Compiles in this thread, and makes sure that XLA scheduled by the profile.

    Raises:
      DataError: XLA does not say so, and the program is not one that it compiled so before.
    """
    with _cache_hits() as hits:
        program = compiled()
    if hits:  # the key of the cache is made of the costs, too
        log.info("XLA scheduled by the costs of %d instructions in a run before; the program was kept.", len(costs))
        return program
    used = xla_log.wait_for(_USED)
    if used is None:
        raise DataError(
            "XLA did not take the profile: its log does not say so.",
            "Make it again with this version: `pax pgle collect RECIPE`.",
        )
    log.info("XLA schedules by the costs of %d instructions: %s", len(costs), used.partition("] ")[2] or used)
    return program


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """What JAX's cache of compiled programs answers to this thread."""
    thread, hits = threading.get_ident(), []

    def heard(event: str, **_: Any) -> None:
        if event == _CACHE_HIT and threading.get_ident() == thread:
            hits.append(event)

    monitoring.register_event_listener(heard)
    try:
        yield hits
    finally:
        monitoring.unregister_event_listener(heard)


def require_same_program(hlo_text: str, costs: dict[str, float]) -> None:
    """Makes sure that the costs are of this program: XLA would drop those of another without a word.

    Raises:
      DataError: They are of another.
    """
    compiled, profiled = fingerprint(hlo_text), fingerprints(costs)
    if compiled and profiled and compiled not in profiled:
        raise DataError(
            f"The profile is of program {', '.join(sorted(profiled))}; this recipe compiles to {compiled}.",
            "Something that the manifest does not know has changed, such as the kernels that XLA found fastest."
            " Make it again: `pax pgle collect RECIPE`.",
        )
