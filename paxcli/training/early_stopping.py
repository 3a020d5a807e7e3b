"""Early stopping: ends a run by a metric of its evaluations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paxcli.config.configurable import Configurable
from paxcli.config.fields import AnyFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.metrics.writers import TRAIN


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
            problem = f"task.early_stopping_fn.input={self.input} is not one of the eval inputs: {', '.join(inputs)}."
            raise ConfigError(problem, "Set it to the name of one, or set `target` and `patience` to null.")

    def reason(self, lines: Iterable[Mapping[str, Any]], last_step: int) -> str | None:
        """Why a run ends, given its lines of metrics; those of later steps do not count. None = it continues.

        Raises:
          ConfigError: An evaluation has no such metric.
        """
        sign = -1 if self.maximize else 1
        best, best_step, waited = math.inf, 0, 0
        for line in lines if self._is_on else ():
            step, split = line["step"], line["split"]
            if step > last_step or split == TRAIN or self.input not in (None, split.partition("/")[2]):
                continue
            if self.metric not in line and "loss" in line:  # with target weights of 0, it has neither
                hint = f"It has {', '.join(line)}."
                raise ConfigError(f"task.early_stopping_fn: an evaluation has no metric `{self.metric}`.", hint)
            value = line.get(self.metric)
            if value is None or not math.isfinite(value):
                continue
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
