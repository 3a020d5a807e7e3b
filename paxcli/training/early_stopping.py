"""Early stopping: ends a run by a metric of its evaluations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from etils import epath

from paxcli.config.configurable import Configurable
from paxcli.config.fields import AnyFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.metrics.curves import FILE_NAME, read_runs


@dataclasses.dataclass(frozen=True)
class EarlyStopping(Configurable):
    """Ends a run when a metric of its evaluations reaches a target, or no longer improves (Pax: `early_stopping_fn`).

    Attributes:
      input: Name of the eval input; None = the only one.
      metric: Name of the metric.
      target: The run ends when the metric is at or below this value; None = off.
      patience: The run ends after this many evaluations in a row without a new best value; None = off.
      maximize: Whether larger values are better: the metric has to be at or above `target`.
    """

    input: str | None = None
    metric: str = "log_pplx"
    target: AnyFloat | None = None
    patience: PositiveInt | None = None
    maximize: bool = False

    def validate(self, inputs: Sequence[str]) -> None:
        """Checks that it follows one of the eval inputs, given their names. Without any, a run never stops early.

        Raises:
          ConfigError: There is no such input, or there are several and none is chosen.
        """
        if self._is_on and inputs and self.input not in (inputs if len(inputs) > 1 else (None, *inputs)):
            raise ConfigError(
                f"task.early_stopping_fn.input={self.input} is not one of the eval inputs: {', '.join(inputs)}.",
                "Set it to the name of one, or set `target` and `patience` to null.",
            )

    def logged_values(self, run_dir: epath.Path, last_step: int) -> dict[int, float]:
        """The metric in each evaluation that a run has logged up to a step, by step; empty when this is off."""
        if not self._is_on or not (run_dir / FILE_NAME).exists():
            return {}
        found: dict[int, float] = {}
        for line in read_runs([run_dir])[0].lines:
            kind, _, name = line["split"].partition("/")
            if kind == "eval" and line["step"] <= last_step:
                found |= self.value(line["step"], {name: line})
        return found

    def value(self, step: int, metrics: Mapping[str, Mapping[str, float | None]]) -> dict[int, float]:
        """The metric in the evaluation of a step, by step; empty when this is off, or the value not finite.

        Raises:
          ConfigError: The evaluation has no such metric.
        """
        followed = [values for name, values in metrics.items() if self._is_on and self.input in (None, name)]
        if followed and self.metric not in followed[0]:
            raise ConfigError(
                f"task.early_stopping_fn: the evaluation has no metric `{self.metric}`.",
                f"It has {', '.join(followed[0])}.",
            )
        value = followed[0][self.metric] if followed else None
        return {} if value is None or not math.isfinite(value) else {step: value}

    def reason(self, values: Mapping[int, float]) -> str | None:
        """Why a run with these values at its evaluated steps ends; None = it continues."""
        sign = -1 if self.maximize else 1
        best, best_step, waited = math.inf, 0, 0
        for step, value in sorted(values.items()):
            if self.target is not None and sign * value <= sign * self.target:
                return f"{self.metric} reached {value:.4f} at step {step} (target {self.target:g})"
            waited += 1
            if sign * value < best:
                best, best_step, waited = sign * value, step, 0
            if waited == self.patience:
                return f"{self.metric} has not improved in {waited} evaluations, since step {best_step}"
        return None

    @property
    def _is_on(self) -> bool:
        return self.target is not None or self.patience is not None
