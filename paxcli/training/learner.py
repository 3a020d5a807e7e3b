"""The learner: turns gradients into new parameters."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import NonNegativeFloat, NotCompiled, PositiveFloat, Range, Steps
from paxcli.errors import ConfigError
from paxcli.mesh.sharding import path_of
from paxcli.optim.adamw import AdamW
from paxcli.optim.base import Optimizer, reduce_groups
from paxcli.optim.schedules import Constant, Schedule


class Averaged(NamedTuple):
    """The state of a learner with `ema_decay`: the optimizer's, and the moving average of the trained parameters."""

    optimizer: Any
    ema: Any


@dataclasses.dataclass(frozen=True)
class Learner(Configurable):
    """Clips gradients, computes the update, applies the learning rate, and skips steps whose gradients are not finite.

    Pax: `paxml.learners.Learner`, and the parts of `praxis.optimizers.BaseOptimizer` that all optimizers share.

    Attributes:
      optimizer: Computes the direction of the update.
      learning_rate: Peak learning rate.
      schedule: Factor of the learning rate at each step.
      clip_gradient_norm_to_value: Largest global norm of the gradients; None = off.
      clip_gradient_single_norm_to_value: Instead, the largest norm of each gradient, over all layers of a stack, and
        over query, key and value where these count as one (`Attention.combine_qkv`); None = off.
      skip_invalid_gradients: Whether to skip the update of a step whose gradients are not finite.
      skip_step_gradient_norm_value: Also skip a step whose global norm, before clipping, is not below this; None = off.
      max_consecutive_skips: The run ends as diverged after this many skipped steps in a row; None = never. Counted at
        each report, over the reports without any update.
      ema_decay: Decay of a moving average of the parameters, which evaluation and decoding use; None = off. As in Pax,
        the decay is at most (1 + n) / (10 + n) at step n, and the average takes the parameters before the update.
      bprop_variable_exclusion: Regular expressions. Parameters whose path, such as `stack/layers/attention/query`,
        matches one of them are frozen and have no optimizer state.
      bprop_variable_inclusion: Instead, train only the parameters that match.
    """

    optimizer: Optimizer = part(AdamW)
    learning_rate: NonNegativeFloat = 1e-3
    schedule: Schedule = part(Constant)
    clip_gradient_norm_to_value: PositiveFloat | None = 1.0
    clip_gradient_single_norm_to_value: PositiveFloat | None = None
    skip_invalid_gradients: bool = True
    skip_step_gradient_norm_value: PositiveFloat | None = None
    max_consecutive_skips: NotCompiled[Steps | None] = 100
    ema_decay: Annotated[float, Range(above=0, below=1)] | None = None
    bprop_variable_exclusion: tuple[str, ...] = ()
    bprop_variable_inclusion: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raises a ConfigError when fields contradict each other."""
        if not isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                f"`optimizer` is a {type(self.optimizer).__name__}, which is not an Optimizer of pax.",
                "Wrap an optax optimizer: `Optax.config(factory=fdl.Partial(optax.lion, b1=0.95))`.",
            )
        self.schedule.validate()
        if self.clip_gradient_norm_to_value is not None and self.clip_gradient_single_norm_to_value is not None:
            raise ConfigError(
                "Gradients are clipped by their global norm or each by its own, not both.",
                "Set `clip_gradient_norm_to_value` or `clip_gradient_single_norm_to_value` to null.",
            )
        if self.bprop_variable_exclusion and self.bprop_variable_inclusion:
            raise ConfigError(
                "Both `bprop_variable_exclusion` and `bprop_variable_inclusion` are set.", "Keep one of them."
            )
        for regex in (*self.bprop_variable_exclusion, *self.bprop_variable_inclusion):
            try:
                re.compile(regex)
            except re.error as error:
                raise ConfigError(f"{regex!r} is not a regular expression: {error}.") from None
        if self.skip_step_gradient_norm_value is not None and not self.skip_invalid_gradients:
            raise ConfigError(
                "`skip_step_gradient_norm_value` has no effect while `skip_invalid_gradients` is false.",
                "Set `skip_invalid_gradients` to true.",
            )

    def init(self, params: dict, weights: Any) -> Any:
        """The optimizer's state for these parameters.

        Args:
          params: The parameters.
          weights: A tree like `params` of the `Weight` of each.

        Raises:
          ConfigError: A regular expression matches no parameter, or no parameter is left to train.
        """
        trained = self._trained_mask(params)
        return self._with_average(params, self._transformation(trained, weights).init(params), trained)

    def warm_start(self, params: dict, opt_state: Any) -> Any:
        """`opt_state` for parameters from another run: their moving average starts from them."""
        if self.ema_decay is None:
            return opt_state
        return self._with_average(params, opt_state.optimizer, self._trained_mask(params))

    def eval_params(self, params: dict, opt_state: Any) -> dict:
        """The parameters to evaluate: the moving average where a parameter has one."""
        if self.ema_decay is None:
            return params
        return jax.tree.map(lambda p, e: p if _is_masked(e) else e, params, opt_state.ema)

    def update(
        self, grads: dict, opt_state: Any, params: dict, step: jax.Array, weights: Any
    ) -> tuple[dict, Any, dict]:
        """One update. `weights` is the tree that `init` took.

        Returns:
          New parameters, new optimizer state, and `learning_rate`, `grad_norm` (before clipping) and `valid`.
        """
        trained = self._trained_mask(params)
        if trained is not None:
            grads = jax.tree.map(lambda g, keep: g if keep else jnp.zeros_like(g), grads, trained)
        grad_norm = optax.tree.norm(_as_float32(grads))
        valid = jnp.isfinite(grad_norm)
        if self.skip_step_gradient_norm_value is not None:
            valid &= grad_norm < self.skip_step_gradient_norm_value
        learning_rate = self.learning_rate * self.schedule(step)

        def apply_update(params: dict, opt_state: Any) -> tuple[dict, Any]:
            old_state = opt_state if self.ema_decay is None else opt_state.optimizer
            # Cast inside: the operands of the `cond` below are materialized in memory.
            updates, new_state = self._transformation(trained, weights).update(
                self._clip(_as_float32(grads), grad_norm, weights), old_state, params, learning_rate=learning_rate
            )
            new_params = jax.tree.map(lambda p, u: p - u.astype(p.dtype), params, updates)
            if self.ema_decay is None:
                return new_params, new_state
            decay = jnp.minimum(self.ema_decay, (1 + step) / (10 + step))
            ema = jax.tree.map(lambda p, e: e if _is_masked(e) else e - (1 - decay) * (e - p), params, opt_state.ema)
            return new_params, Averaged(new_state, ema)

        if self.skip_invalid_gradients:
            new_params, new_opt_state = jax.lax.cond(valid, apply_update, lambda *old: old, params, opt_state)
        else:
            new_params, new_opt_state = apply_update(params, opt_state)
        return new_params, new_opt_state, {"learning_rate": learning_rate, "grad_norm": grad_norm, "valid": valid}

    def _transformation(self, trained: Any, weights: Any) -> optax.GradientTransformationExtraArgs:
        if trained is None:
            return self.optimizer.with_learning_rate(weights)
        weights = jax.tree.map(lambda weight, keep: weight if keep else optax.MaskedNode(), weights, trained)
        return optax.masked(self.optimizer.with_learning_rate(weights), trained)

    def grad_scale(self, grad_norm: jax.Array) -> jax.Array:
        """The factor by which `clip_gradient_norm_to_value` scales gradients of this global norm; 1 when it is off."""
        largest = self.clip_gradient_norm_to_value
        return jnp.ones_like(grad_norm) if largest is None else jnp.minimum(1.0, largest / grad_norm)

    def _clip(self, grads: dict, grad_norm: jax.Array, weights: Any) -> dict:
        if self.clip_gradient_norm_to_value is not None:
            scale = self.grad_scale(grad_norm)
            return jax.tree.map(lambda g: g * scale, grads)
        if self.clip_gradient_single_norm_to_value is not None:
            largest = self.clip_gradient_single_norm_to_value
            norms = jax.tree.map(lambda g: jnp.linalg.norm(g.ravel()), grads)
            norms = reduce_groups(jnp.linalg.norm, norms, weights)
            return jax.tree.map(lambda g, norm: g * jnp.minimum(1.0, largest / norm), grads, norms)
        return grads

    def _with_average(self, params: dict, opt_state: Any, trained: Any) -> Any:
        """`opt_state` with a moving average that starts from `params`, if `ema_decay` is set."""
        if self.ema_decay is None:
            return opt_state
        if trained is None:
            return Averaged(opt_state, jax.tree.map(jnp.copy, params))
        return Averaged(
            opt_state, jax.tree.map(lambda p, keep: jnp.copy(p) if keep else optax.MaskedNode(), params, trained)
        )

    def _trained_mask(self, params: dict) -> Any:
        """A tree of whether each parameter is trained; None when all are."""
        regexes = self.bprop_variable_inclusion or self.bprop_variable_exclusion
        if not regexes:
            return None
        field = "bprop_variable_inclusion" if self.bprop_variable_inclusion else "bprop_variable_exclusion"
        names = ["/".join(path_of(path)) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for regex in regexes:
            if not any(re.search(regex, name) for name in names):
                raise ConfigError(f"{field}: {regex!r} matches no parameter.", f"Parameters: {', '.join(names[:8])}, …")
        matched = [any(re.search(regex, name) for regex in regexes) for name in names]
        trained = [match == bool(self.bprop_variable_inclusion) for match in matched]
        if not any(trained):
            raise ConfigError("`bprop_variable_exclusion` leaves no parameter to train.", "Exclude fewer.")
        return jax.tree.unflatten(jax.tree.structure(params), trained)


def _as_float32(grads: dict) -> dict:
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
