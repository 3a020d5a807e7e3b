"""Adafactor with the update rule of Pax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveFloat, PositiveInt
from paxcli.mesh.weights import Weight
from paxcli.optim.base import Optimizer, corrected_decay


class AdafactorState(NamedTuple):
    """The number of updates, and the moments of each parameter; `optax.MaskedNode` where it has none.

    `row` and `column` are the factored second moment of a matrix: its means over columns and over rows. `full` is the
    second moment of any other parameter. `momentum` averages updates that the learning rate already multiplies.
    """

    count: jax.Array
    momentum: dict
    row: dict
    column: dict
    full: dict


class _Slots(NamedTuple):
    """The moments of one parameter."""

    momentum: Any
    row: Any
    column: Any
    full: Any


@dataclasses.dataclass(frozen=True)
class ShardedAdafactor(Optimizer):
    """Adafactor: the second moment of a matrix is factored into row and column moments (Shazeer and Stern, 2018).

    Pax: `praxis.optimizers.ShardedAdafactor`, without its quantized momentum (`quantized_dtype`): momentum is float32.
    Order: scale, clip, learning rate, momentum, weight decay. Each stacked layer is a tensor of its own. Without
    sorting, a weight with more than two dimensions is a stack of matrices; the output projection of attention is
    [N, H, D] here and [D, N, H] in Pax, so it is factored along other dimensions.

    Attributes:
      decay_method: The second moment's decay: `adam` is `decay_adam`, corrected for bias; `pow` is
        1 - step ** -`decay_pow`.
      decay_adam: Decay of the second moment, for `adam`.
      decay_pow: Exponent, for `pow`.
      beta1: Decay of the momentum; 0 = no momentum.
      clipping_threshold: Largest root-mean-square of a parameter's update; None = off.
      factored: Whether second moments of matrices are factored.
      sort_factored_second_moment_dims: Whether to factor the two largest dimensions instead of the last two.
      min_dim_size_to_factor: Smallest size of the two dimensions that is factored, with sorting.
      multiply_by_parameter_scale: Whether to multiply updates by the root-mean-square of the parameter.
      epsilon1_grad_sq_reg: Added to squared gradients.
      epsilon2_param_scale_reg: Lower bound of that root-mean-square.
      weight_decay: Weight decay, multiplied by the learning rate; 0 = none.
      decay_norms_and_biases: Whether scales and biases decay too, as in Pax.
    """

    decay_method: Literal["adam", "pow"] = "adam"
    decay_adam: DecayRate = 0.99
    decay_pow: PositiveFloat = 0.8
    beta1: DecayRate = 0.9
    clipping_threshold: PositiveFloat | None = 1.0
    factored: bool = True
    sort_factored_second_moment_dims: bool = False
    min_dim_size_to_factor: PositiveInt = 128
    multiply_by_parameter_scale: bool = False
    epsilon1_grad_sq_reg: NonNegativeFloat = 1e-30
    epsilon2_param_scale_reg: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = True

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        """The transformation at a constant learning rate of 1."""
        scaled = self.with_learning_rate(weights)
        return optax.GradientTransformation(scaled.init, functools.partial(scaled.update, learning_rate=1.0))

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        init, update = functools.partial(self._init, weights), functools.partial(self._update, weights)
        return optax.GradientTransformationExtraArgs(init, update)

    def _init(self, weights: Any, params: Any) -> AdafactorState:
        def slots(param: jax.Array, weight: Weight) -> _Slots:
            lead = param.shape[: weight.num_stacked]
            shape = param.shape[len(lead) :]
            none = optax.MaskedNode()
            momentum = jnp.zeros_like(param) if self.beta1 else none
            dims = self._factored_dims(shape)
            if dims is None:
                return _Slots(momentum, none, none, jnp.zeros_like(param))
            row, column = (jnp.zeros(lead + _without(shape, dim), param.dtype) for dim in dims)
            return _Slots(momentum, row, column, none)

        return _state(jnp.zeros([], jnp.int32), jax.tree.map(slots, params, weights))

    def _update(
        self, weights: Any, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AdafactorState]:
        count, learning_rate = state.count + 1, extra_args["learning_rate"]
        decay = corrected_decay(self.decay_adam, count)
        if self.decay_method == "pow":
            decay = 1 - count.astype(jnp.float32) ** -self.decay_pow

        def update(grad: jax.Array, param: jax.Array, weight: Weight, *slots: Any) -> tuple[jax.Array, _Slots]:
            weight_decay = self.weight_decay if self.decay_norms_and_biases or weight.is_matrix else 0.0
            one = functools.partial(self._update_one, decay, learning_rate, weight_decay)
            for _ in range(weight.num_stacked):
                one = jax.vmap(one)
            return one(grad, param, _Slots(*slots))

        both = jax.tree.map(update, updates, params, weights, *state[1:])
        updates, slots = (jax.tree.map(lambda _, pair, i=i: pair[i], updates, both) for i in (0, 1))
        return updates, _state(count, slots)

    def _update_one(
        self, decay: Any, learning_rate: Any, weight_decay: float, grad: jax.Array, param: jax.Array, slots: _Slots
    ) -> tuple[jax.Array, _Slots]:
        """The update of one tensor, to subtract, and its new moments."""
        squared = jnp.square(grad) + self.epsilon1_grad_sq_reg
        dims = self._factored_dims(grad.shape)
        if dims is None:
            full = decay * slots.full + (1 - decay) * squared
            slots = slots._replace(full=full)
            update = grad / jnp.sqrt(full)
        else:
            over_row, over_column = dims
            row = decay * slots.row + (1 - decay) * jnp.mean(squared, axis=over_row)
            column = decay * slots.column + (1 - decay) * jnp.mean(squared, axis=over_column)
            slots = slots._replace(row=row, column=column)
            mean = jnp.mean(row, axis=over_column - (over_column > over_row), keepdims=True)
            update = grad / jnp.sqrt(jnp.expand_dims(row / mean, over_row) * jnp.expand_dims(column, over_column))
        if self.clipping_threshold is not None:
            update = update / jnp.maximum(1.0, _rms(update) / self.clipping_threshold)
        if self.multiply_by_parameter_scale:
            update = update * jnp.maximum(_rms(param), self.epsilon2_param_scale_reg)
        update = learning_rate * update
        if self.beta1:
            update = self.beta1 * slots.momentum + (1 - self.beta1) * update
            slots = slots._replace(momentum=update)
        return update + learning_rate * weight_decay * param, slots

    def _factored_dims(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The dimensions that the row and the column moment average over; None for an unfactored tensor."""
        if not self.factored or len(shape) < 2:
            return None
        if not self.sort_factored_second_moment_dims:
            return len(shape) - 1, len(shape) - 2
        largest, second = sorted(range(len(shape)), key=lambda dim: -shape[dim])[:2]
        return (largest, second) if shape[second] >= self.min_dim_size_to_factor else None


def _state(count: jax.Array, slots: Any) -> AdafactorState:
    def each(name: str) -> Any:
        return jax.tree.map(lambda one: getattr(one, name), slots, is_leaf=lambda node: isinstance(node, _Slots))

    return AdafactorState(count, *map(each, _Slots._fields))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))
