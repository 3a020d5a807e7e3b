"""From gradients to new parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable, part
from paxcli.optim.adamw import AdamW
from paxcli.optim.base import Optimizer
from paxcli.optim.schedules import Constant, Schedule


@dataclasses.dataclass(frozen=True)
class Learner(Configurable):
    """Clips gradients, asks the optimizer, scales by the learning rate, and refuses steps that are not finite.

    Pax: `paxml.learners.Learner`.

    Attributes:
      optimizer: Direction of the update.
      learning_rate: Peak learning rate.
      schedule: Factor of the learning rate at each step.
      clip_gradient_norm_to_value: Largest global norm of the gradients; None = off.
      skip_invalid_gradients: Whether a step whose gradients are not finite leaves parameters and optimizer as they are.
    """

    optimizer: Optimizer = part(AdamW)
    learning_rate: float = 1e-3
    schedule: Schedule = part(Constant)
    clip_gradient_norm_to_value: float | None = 1.0
    skip_invalid_gradients: bool = True

    def init(self, params: dict) -> Any:
        """The optimizer's state for these parameters."""
        return self.optimizer.transformation().init(params)

    def update(self, grads: dict, opt_state: Any, params: dict, step: jax.Array) -> tuple[dict, Any, dict]:
        """One update.

        Returns:
          New parameters, new optimizer state, and `learning_rate`, `grad_norm` (before clipping) and `valid`.
        """
        grad_norm = optax.tree.norm(grads)
        valid = jnp.isfinite(grad_norm)
        if self.clip_gradient_norm_to_value is not None:
            scale = jnp.minimum(1.0, self.clip_gradient_norm_to_value / grad_norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, new_opt_state = self.optimizer.transformation().update(grads, opt_state, params)
        learning_rate = self.learning_rate * self.schedule(step)
        new_params = jax.tree.map(lambda p, u: p - (learning_rate * u).astype(p.dtype), params, updates)
        if self.skip_invalid_gradients:
            new_params, new_opt_state = jax.tree.map(
                lambda new, old: jnp.where(valid, new, old), (new_params, new_opt_state), (params, opt_state)
            )
        return new_params, new_opt_state, {"learning_rate": learning_rate, "grad_norm": grad_norm, "valid": valid}
