"""Ends a run that diverged: a loss or parameters that are not finite, or too many skipped steps in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.errors import DivergedError
from paxcli.metrics.meter import Record
from paxcli.metrics.writers import is_finite
from paxcli.training.learner import Learner

_KEPT = "Earlier checkpoints are kept."
_HINT = "Lower `learning_rate` or `clip_gradient_norm_to_value`, lengthen the warmup, or see `pax inspect-input`."


class DivergenceCheck:
    """Checks the reports of a run, and the parameters of each checkpoint.

    Args:
      learner: What skips steps whose gradients are not finite.
      step: The step that the run starts from.
      skipped_steps: Steps that were skipped up to there.
      lines: The run's lines of metrics up to there, whose skipped steps count too.
    """

    def __init__(self, learner: Learner, step: int, skipped_steps: int, lines: Iterable[Mapping[str, Any]] = ()):
        self._learner, updates = learner, step - skipped_steps
        since = [line["step"] for line in lines if line.get("skipped_steps") == line["step"] - updates]
        # After an update that no report follows yet, the next report counts as the first one.
        self._updates = updates if since or not step else None
        self._last_update = min(since, default=step)  # the first report after it

    def check_record(self, record: Record) -> None:
        """Raises DivergedError when a reported loss is not finite, or no step of the last reports updated.

        A loss that is not finite is accepted if its step was skipped and the parameters are finite.
        """
        values = record.values
        updates = record.step - int(values["skipped_steps"])  # pyrefly: ignore
        if updates != self._updates:
            self._updates, self._last_update = updates, record.step
        in_a_row = record.step - self._last_update
        was_skipped = self._learner.skip_invalid_gradients and not is_finite(values["grad_norm"])
        if not is_finite(values["loss"]) and not (was_skipped and is_finite(values["param_norm"])):
            raise DivergedError(f"The loss of step {record.step} is {values['loss']}. {_KEPT}", _HINT)
        most = self._learner.max_consecutive_skips
        if most is not None and in_a_row >= most:
            reason = "their gradients are not finite, or above `skip_step_gradient_norm_value`"
            text = f"The last {in_a_row} steps up to step {record.step} were skipped: {reason}. {_KEPT}"
            raise DivergedError(text, f"{_HINT} `max_consecutive_skips` is the limit.")

    def check_params(self, step: int, params: Any) -> None:
        """Raises DivergedError when parameters are not finite, so that they are never saved."""
        if not _all_finite(params):
            raise DivergedError(f"The parameters after step {step} are not finite: they are not saved. {_KEPT}", _HINT)


@jax.jit
def _all_finite(params: Any) -> jax.Array:
    """One reduction over all parameters, on the devices that hold them."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()
