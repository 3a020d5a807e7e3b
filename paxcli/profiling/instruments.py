"""Chooses how a run's train step is compiled and observed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paxcli.errors import ConfigError

if TYPE_CHECKING:
    import fiddle as fdl

    from paxcli.training.experiment import Experiment
    from paxcli.training.instrument import Instrument
    from paxcli.training.run_dir import RunDir


@dataclasses.dataclass(frozen=True)
class Instrumentation:
    """Options of `pax train` that change how its step is compiled and observed, but not what it computes.

    Attributes:
      compiled: A file that `pax compile --save` wrote: its step is used. None = compile the step.
      profile_steps: The steps to trace, `"FIRST:LAST"`.
      auto_pgle: Whether JAX profiles the first steps and recompiles with the profile (GPUs only).
      pgle_runs: Steps that `auto_pgle` profiles; None = 3.
      pgle_percentile: The percentile of an instruction's costs that `auto_pgle` uses; None = 90.
      expect_pgle: Whether to use the program that `auto_pgle` left in JAX's cache.
      reuse_step: Whether to use the step that an earlier run compiled, if neither recipe nor source code changed.

    Raises:
      ConfigError: Options exclude each other, or there is no such file.
    """

    compiled: str | os.PathLike[str] | None = None
    profile_steps: str | None = None
    auto_pgle: bool = False
    pgle_runs: int | None = None
    pgle_percentile: int | None = None
    expect_pgle: bool = False
    reuse_step: bool = False

    def __post_init__(self) -> None:
        if (self.pgle_runs or self.pgle_percentile) and not self.auto_pgle:
            raise ConfigError("--pgle-runs and --pgle-percentile belong to --auto-pgle.", "Add `--auto-pgle`.")
        if self.auto_pgle and self.expect_pgle:
            raise ConfigError("--auto-pgle makes a profile, --expect-pgle uses an earlier one.", "Give one of them.")
        pgle = self.auto_pgle or self.expect_pgle
        if self.profile_steps and pgle:
            problem = "--profile-steps traces a step that is compiled ahead of time; JAX's automatic mode does not."
            raise ConfigError(problem, "Trace in another run, or train with `pax pgle apply`.")
        if self.compiled is not None and (pgle or self.profile_steps is not None):
            raise ConfigError("--compiled uses a compiled step; profiling compiles it again.", "Leave out one of them.")
        if self.compiled is not None and not Path(self.compiled).is_file():
            raise ConfigError(f"There is no file {self.compiled}.", "Make it: `pax compile RECIPE --save FILE`.")

    def instrument(self, config: fdl.Config[Experiment], run_dir: RunDir) -> Instrument:
        """The instrument for a run.

        Raises:
          MissingError: Profile-guided compilation was asked for, and these devices give no profile.
        """
        from paxcli.profiling.auto import AutoPgle
        from paxcli.profiling.runner import require_profile_device
        from paxcli.profiling.steps import StepTracer, parse_steps
        from paxcli.programs.executable import Precompiled
        from paxcli.programs.program_cache import KeptPrograms

        if self.auto_pgle or self.expect_pgle:
            require_profile_device(config)  # elsewhere JAX would recompile for nothing
            return AutoPgle((self.pgle_runs or 3) if self.auto_pgle else None, self.pgle_percentile or 90)
        if self.compiled is not None:
            return Precompiled(Path(self.compiled))
        steps = parse_steps(self.profile_steps, config.task.train.num_train_steps) if self.profile_steps else None
        return StepTracer(run_dir.profile, steps, KeptPrograms() if self.reuse_step else None)
