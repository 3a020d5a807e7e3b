"""The learner: turns gradients into new parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import NonNegativeFloat, NotCompiled, PositiveFloat, Range, Steps
from paxcli.errors import ConfigError
from paxcli.mesh.sharding import path_of
from paxcli.mesh.weights import Weight, match_parameters, parameter_names
from paxcli.optim.adamw import AdamW
from paxcli.optim.base import Optimizer, ParameterGroup, decay_mask, map_groups
from paxcli.optim.dp_sgd import DpSgd
from paxcli.optim.regularizers import elastic_weight_consolidation, l1_penalty
from paxcli.optim.schedules import Constant, Schedule

_FROZEN, _MAIN = -1, 0


class Averaged(NamedTuple):
    """The state of a learner with `ema_decay`: the optimizer's, and the moving average of the trained parameters."""

    optimizer: Any
    ema: Any


@dataclasses.dataclass(frozen=True)
class Learner(Configurable):
    """Clips gradients, computes the update, applies the learning rate, and skips steps whose gradients are not finite.

    Pax: `paxml.learners.Learner` and `MultiOptimizerLearner`, and the parts of `praxis.optimizers.BaseOptimizer` that
    all optimizers share.

    Attributes:
      optimizer: Computes the direction of the update.
      learning_rate: Peak learning rate.
      schedule: Factor of the learning rate at each step.
      stochastic_gradient: Makes the gradients differentially private; None = off.
      clip_gradient_norm_to_value: Largest global norm of the gradients; None = off.
      clip_gradient_single_norm_to_value: Instead, the largest norm of each gradient, over all layers of a stack, and
        over query, key and value where these count as one (`Attention.combine_qkv`); None = off.
      clip_each_microbatch: Whether to clip the gradient of each microbatch and apply their unweighted mean, as Pax's
        `ShardedStaticAccumulator` does, instead of clipping the gradient of the batch. `grad_norm`, and with it
        `skip_step_gradient_norm_value`, is then that of this mean.
      skip_invalid_gradients: Whether to skip the update of a step whose gradients are not finite.
      skip_step_gradient_norm_value: Also skip a step whose global norm, before clipping, is not below this; None = off.
      max_consecutive_skips: The run ends as diverged after this many skipped steps in a row; None = never. Counted at
        each report, over the reports without any update.
      ema_decay: Decay of a moving average of the parameters, which evaluation and decoding use; None = off. As in Pax,
        the decay is at most (1 + n) / (10 + n) at step n, and the average takes the parameters before the update.
      bprop_variable_exclusion: Regular expressions. Parameters whose path, such as `stack/layers/attention/query`,
        matches one of them are frozen: no gradient is computed for them, and they have no optimizer state.
      bprop_variable_inclusion: Instead, train only the parameters that match.
      l1_regularizer_weight: Weight of the sum of absolute parameters in the loss; 0 = none. The gradient is added after
        clipping, as in Pax, and the reported loss does not include it.
      l2_regularizer_weight: Weight of half the sum of squared parameters, likewise.
      regularize_norms_and_biases: Whether both penalties include scales and biases.
      ewc_regularizer_weight: Pulls parameters back to those at the start of the run (EWC): `learning_rate *
        ewc_regularizer_weight / 2 * (parameter - its start)` is subtracted from each; 0 = none. A start from another
        run's parameters is a start.
      scale_update_by_var_norm: Whether to multiply the update of each weight with two or more dimensions by the scale
        of its initial values (`Weight.init_scale`).
      parameter_groups: Parameters with another optimizer, learning rate or schedule. No parameter is in two of them.
    """

    optimizer: Optimizer = part(AdamW)
    learning_rate: NonNegativeFloat = 1e-3
    schedule: Schedule = part(Constant)
    stochastic_gradient: DpSgd | None = None
    clip_gradient_norm_to_value: PositiveFloat | None = 1.0
    clip_gradient_single_norm_to_value: PositiveFloat | None = None
    clip_each_microbatch: bool = False
    skip_invalid_gradients: bool = True
    skip_step_gradient_norm_value: PositiveFloat | None = None
    max_consecutive_skips: NotCompiled[Steps | None] = 100
    ema_decay: Annotated[float, Range(above=0, below=1)] | None = None
    bprop_variable_exclusion: tuple[str, ...] = ()
    bprop_variable_inclusion: tuple[str, ...] = ()
    l1_regularizer_weight: NonNegativeFloat = 0.0
    l2_regularizer_weight: NonNegativeFloat = 0.0
    regularize_norms_and_biases: bool = False
    ewc_regularizer_weight: NonNegativeFloat = 0.0
    scale_update_by_var_norm: bool = False
    parameter_groups: tuple[ParameterGroup, ...] = ()

    def validate(self) -> None:
        """Raises a ConfigError when fields contradict each other."""
        for optimizer, schedule, _ in self._optimizers():
            if not isinstance(optimizer, Optimizer):
                kind = type(optimizer).__name__
                hint = "Wrap an optax optimizer: `Optax.config(factory=fdl.Partial(optax.lion, b1=0.95))`."
                raise ConfigError(f"`optimizer` is a {kind}, which is not an Optimizer of pax.", hint)
            optimizer.validate()
            schedule.validate()
        if self.clip_gradient_norm_to_value is not None and self.clip_gradient_single_norm_to_value is not None:
            hint = "Set `clip_gradient_norm_to_value` or `clip_gradient_single_norm_to_value` to null."
            raise ConfigError("Gradients are clipped by their global norm or each by its own, not both.", hint)
        clips = self.clip_gradient_norm_to_value or self.clip_gradient_single_norm_to_value
        if self.clip_each_microbatch and (self.stochastic_gradient is not None or not clips):
            problem = "`clip_each_microbatch` has no effect: gradients are not clipped, or those of examples are."
            hint = "Set it to false, or `clip_gradient_norm_to_value` without `stochastic_gradient`."
            raise ConfigError(problem, hint)
        if self.bprop_variable_exclusion and self.bprop_variable_inclusion:
            hint = "Keep one of them."
            raise ConfigError("Both `bprop_variable_exclusion` and `bprop_variable_inclusion` are set.", hint)
        if self.skip_step_gradient_norm_value is not None and not self.skip_invalid_gradients:
            problem = "`skip_step_gradient_norm_value` has no effect while `skip_invalid_gradients` is false."
            raise ConfigError(problem, "Set `skip_invalid_gradients` to true.")

    @property
    def selects_parameters(self) -> bool:
        """Whether a field has regular expressions of parameters."""
        return bool(self.bprop_variable_exclusion or self.bprop_variable_inclusion or self.parameter_groups)

    def select_trained(self, params: dict) -> dict:
        """`params` with `optax.MaskedNode` in place of frozen parameters; see `replace_trained`.

        Raises:
          ConfigError: A regular expression matches no parameter, or no parameter is left to train.
        """
        return _where(_FROZEN.__ne__, self._owners(params), params)

    def init(self, params: dict, weights: Any) -> Any:
        """The optimizer's state for these parameters, and a moving average that starts from them, if one is kept.

        Args:
          params: The parameters.
          weights: A tree like `params` of the `Weight` of each.

        Raises:
          ConfigError: A regular expression matches no parameter, or no parameter is left to train.
        """
        states = tuple(one.init(params) for one in self._transformations(params, weights))
        state = states if self.parameter_groups else states[0]
        return state if self.ema_decay is None else Averaged(state, jax.tree.map(jnp.copy, self.select_trained(params)))

    def eval_params(self, params: dict, opt_state: Any) -> dict:
        """The parameters to evaluate: the moving average where a parameter has one."""
        return params if self.ema_decay is None else replace_trained(params, opt_state.ema)

    def update(self, grads: Any, opt_state: Any, params: dict, step: jax.Array, weights: Any) -> tuple[dict, Any, dict]:
        """One update.

        Args:
          grads: Gradients by the parameters; those by frozen parameters do not count, and may be missing.
          opt_state: The state that `init` made.
          params: The parameters.
          step: Number of the update, from 0.
          weights: The tree that `init` took.

        Returns:
          New parameters, new optimizer state, and `learning_rate`, `grad_norm` (before clipping) and `valid`: whether
          the update was applied rather than skipped.
        """
        owners = self._owners(params)
        grads, weights = (_where(_FROZEN.__ne__, owners, tree) for tree in (grads, weights))
        grad_norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
        valid = jnp.isfinite(grad_norm) | (not self.skip_invalid_gradients)
        if self.skip_step_gradient_norm_value is not None:
            valid &= grad_norm < self.skip_step_gradient_norm_value
        rates = [multiplier * self.learning_rate * schedule(step) for _, schedule, multiplier in self._optimizers()]

        def apply_update(params: dict, opt_state: Any) -> tuple[dict, Any]:
            old = opt_state if self.ema_decay is None else opt_state.optimizer
            # Cast inside: the operands of the `cond` below are materialized in memory.
            updates, states = self.clip(grads, grad_norm, weights), []
            olds = old if self.parameter_groups else (old,)
            for one, state, rate in zip(self._transformations(params, weights), olds, rates, strict=True):
                updates, state = one.update(updates, state, params, learning_rate=rate)
                states.append(state)
            new_state = tuple(states) if self.parameter_groups else states[0]
            if self.scale_update_by_var_norm:
                updates = jax.tree_util.tree_map_with_path(_scale_by_initial_norm, updates, weights)
            new_params = jax.tree.map(lambda p, u: p if _is_masked(u) else p - u.astype(p.dtype), params, updates)
            if self.ema_decay is None:
                return new_params, new_state
            decay = jnp.minimum(self.ema_decay, (1 + step) / (10 + step))
            ema = jax.tree.map(lambda p, e: e if _is_masked(e) else e - (1 - decay) * (e - p), params, opt_state.ema)
            return new_params, Averaged(new_state, ema)

        if self.skip_invalid_gradients:
            new_params, new_opt_state = jax.lax.cond(valid, apply_update, lambda *old: old, params, opt_state)
        else:
            new_params, new_opt_state = apply_update(params, opt_state)
        return new_params, new_opt_state, {"learning_rate": rates[0], "grad_norm": grad_norm, "valid": valid}

    def _optimizers(self) -> list[tuple[Optimizer, Schedule, float]]:
        """Optimizer, schedule, and factor of the learning rate: those of the learner, then of each parameter group."""
        return [
            (group.optimizer or self.optimizer, group.schedule or self.schedule, group.learning_rate_multiplier)
            for group in (ParameterGroup(""), *self.parameter_groups)
        ]

    def _transformations(self, params: dict, weights: Any) -> list[optax.GradientTransformationExtraArgs]:
        """The transformation of each of `_optimizers`, which leaves the gradients of other parameters unchanged."""
        if not self.selects_parameters:
            return [self._with_penalties(self.optimizer, weights)]
        owners, found = self._owners(params), []
        for number, (optimizer, *_) in enumerate(self._optimizers()):
            mask = jax.tree.map(number.__eq__, owners)
            own = self._with_penalties(optimizer, _where(number.__eq__, owners, weights))
            found.append(optax.masked(own if any(jax.tree.leaves(mask)) else optax.identity(), mask))
        return found

    def _with_penalties(self, optimizer: Optimizer, weights: Any) -> Any:
        """The optimizer's transformation between those of the penalties."""
        mask = decay_mask(weights, self.regularize_norms_and_biases)
        chain: list[Any] = []
        if self.l1_regularizer_weight:
            chain.append(l1_penalty(self.l1_regularizer_weight, mask))
        if self.l2_regularizer_weight:
            chain.append(optax.add_decayed_weights(self.l2_regularizer_weight, mask))
        chain.append(optimizer.with_learning_rate(weights))
        if self.ewc_regularizer_weight:
            chain.append(elastic_weight_consolidation(self.ewc_regularizer_weight))
        return chain[0] if len(chain) == 1 else optax.chain(*chain)

    def _owners(self, params: Any) -> Any:
        """A tree of what updates each parameter: `_FROZEN`, `_MAIN`, or the number of its group from 1."""
        names = parameter_names(params)
        owners = [_MAIN] * len(names)
        for number, group in enumerate(self.parameter_groups, start=1):
            matches = match_parameters(f"parameter_groups.{number - 1}.regex", group.regex, names)
            for index in (index for index, match in enumerate(matches) if match):
                if owners[index] != _MAIN:
                    both = f"{self.parameter_groups[owners[index] - 1].regex!r} and {group.regex!r}"
                    problem = f"Two of `parameter_groups` match `{names[index]}`: {both}."
                    raise ConfigError(problem, "Change one of the expressions.")
                owners[index] = number
        for field, is_trained in (("bprop_variable_exclusion", False), ("bprop_variable_inclusion", True)):
            matches = [match_parameters(field, regex, names) for regex in getattr(self, field)]
            if matches:
                kept = [any(found) == is_trained for found in zip(*matches, strict=True)]
                owners = [owner if keep else _FROZEN for owner, keep in zip(owners, kept, strict=True)]
        if all(owner == _FROZEN for owner in owners):
            raise ConfigError("`bprop_variable_exclusion` leaves no parameter to train.", "Exclude fewer.")
        return jax.tree.unflatten(jax.tree.structure(params), owners)

    def grad_scale(self, grad_norm: jax.Array) -> jax.Array:
        """The factor by which `clip_gradient_norm_to_value` scales gradients of this global norm; 1 when it is off."""
        largest = self.clip_gradient_norm_to_value
        return jnp.ones_like(grad_norm) if largest is None else jnp.minimum(1.0, largest / grad_norm)

    def clip(self, grads: Any, grad_norm: jax.Array, weights: Any) -> Any:
        """The gradients of trained parameters, clipped, in float32.

        Args:
          grads: The gradients.
          grad_norm: Their global norm.
          weights: The `Weight` of each.
        """
        grads = optax.tree.cast(grads, jnp.float32)
        if self.clip_gradient_single_norm_to_value is not None:
            clip = functools.partial(_clip_group, self.clip_gradient_single_norm_to_value)
            return map_groups(clip, weights, grads, by_layer=False)[0]
        return optax.tree.scale(self.grad_scale(grad_norm), grads)


def _clip_group(largest: float, _: Weight, grads: list[jax.Array]) -> tuple[list[jax.Array]]:
    """The gradients of tensors that count as one, scaled to a norm of at most `largest`."""
    return (optax.tree.scale(jnp.minimum(1.0, largest / optax.tree.norm(grads)), grads),)


def replace_trained(params: dict, trained: dict) -> dict:
    """`params` with the parameters of `trained`, which `Learner.select_trained` made, in place of its own."""
    return jax.tree.map(lambda old, new: old if _is_masked(new) else new, params, trained)


def _where(condition: Callable[[int], bool], owners: Any, tree: Any) -> Any:
    """`tree` with `optax.MaskedNode` where the condition does not hold."""
    return jax.tree.map(lambda owner, leaf: leaf if condition(owner) else optax.MaskedNode(), owners, tree)


def _scale_by_initial_norm(path: Any, update: jax.Array, weight: Weight) -> jax.Array:
    if len(weight.axes) < 2:
        return update
    if weight.init_scale is None:
        problem = f"the scale of the initial values of `{'/'.join(path_of(path))}` is unknown"
        raise ConfigError(f"`scale_update_by_var_norm`: {problem}.", "Initialize it by an `Init` that has a `scale`.")
    return weight.init_scale * update


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
