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
from paxcli.optim.base import Optimizer, clip_rms, corrected_decay, map_groups, rms


class AdafactorState(NamedTuple):
    """The number of updates, and the moments of each parameter; `optax.MaskedNode` where it has none.

    `row` and `column` are the factored second moment of a matrix: its means over columns and over rows. `full` is the
    second moment of any other parameter. `momentum` averages updates that the learning rate already multiplies; where
    it is int8, it counts in units of `momentum_scale`, which the first parameter of a group holds for all of them.
    """

    count: jax.Array
    momentum: dict
    momentum_scale: dict
    row: dict
    column: dict
    full: dict


@dataclasses.dataclass(frozen=True)
class ShardedAdafactor(Optimizer):
    """Adafactor: the second moment of a matrix is factored into row and column moments (Shazeer and Stern, 2018).

    Pax: `praxis.optimizers.ShardedAdafactor`. Order: scale, clip, learning rate, momentum, weight decay. Each stacked
    layer is a tensor of its own. Statistics are those of the variables of praxis, whichever way the parameters are
    stored: query, key and value are one [3, D, N, H] where they are combined (`Attention.combine_qkv`), the output
    projection of attention is [D, N, H], and a matrix is [contracted, produced]. Without sorting, a weight with more
    than two dimensions is a stack of matrices of the last two.

    Attributes:
      decay_method: The second moment's decay: `adam` is `decay_adam`, corrected for bias; `pow` is
        1 - step ** -`decay_pow`.
      decay_adam: Decay of the second moment, for `adam`.
      decay_pow: Exponent, for `pow`.
      beta1: Decay of the momentum; 0 = no momentum.
      momentum_dtype: How the momentum is stored (Pax: `quantized_dtype`). `int8`, which is Pax's default, rounds it to
        127 steps of the largest absolute value along praxis's first dimension: of the inputs of a matmul, or of query,
        key and value.
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
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    clipping_threshold: PositiveFloat | None = 1.0
    factored: bool = True
    sort_factored_second_moment_dims: bool = False
    min_dim_size_to_factor: PositiveInt = 128
    multiply_by_parameter_scale: bool = False
    epsilon1_grad_sq_reg: NonNegativeFloat = 1e-30
    epsilon2_param_scale_reg: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = True

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        init, update = functools.partial(self._init, weights), functools.partial(self._update, weights)
        return optax.GradientTransformationExtraArgs(init, update)

    def _init(self, weights: Any, params: Any) -> AdafactorState:
        return AdafactorState(jnp.zeros([], jnp.int32), *map_groups(self._init_group, weights, params))

    def _init_group(self, weight: Weight, params: list[jax.Array]) -> tuple[list, ...]:
        """The moments of tensors that count as one, in the order of `AdafactorState`."""
        momentum = scale = row = column = full = [optax.MaskedNode() for _ in params]
        if self.beta1:
            momentum, scale = self._store_momenta(weight, [jnp.zeros(param.shape, jnp.float32) for param in params])
        dims = self._factored_dims(weight, params[0].shape)
        if dims is None:
            full = [jnp.zeros_like(param) for param in params]
        else:
            row, column = ([jnp.zeros_like(jnp.take(param, 0, dim)) for param in params] for dim in dims)
        return momentum, scale, row, column, full

    def _update(
        self, weights: Any, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AdafactorState]:
        count = state.count + 1
        decay = corrected_decay(self.decay_adam, count)
        if self.decay_method == "pow":
            decay = 1 - count.astype(jnp.float32) ** -self.decay_pow
        update = functools.partial(self._update_group, decay, extra_args["learning_rate"])
        updates, *moments = map_groups(update, weights, updates, params, *state[1:])
        return updates, AdafactorState(count, *moments)

    def _update_group(
        self, decay: Any, rate: Any, weight: Weight, grads: list[jax.Array], params: list[jax.Array], *moments: list
    ) -> tuple[list, ...]:
        """The updates at this learning rate, to subtract, of tensors that count as one, and their new moments."""
        momentum, momentum_scale, *second_moments = moments
        scaled = [self._scale(weight, decay, *one) for one in zip(grads, *second_moments, strict=True)]
        updates, *new_second_moments = map(list, zip(*scaled, strict=True))
        if self.clipping_threshold is not None:
            updates = clip_rms(updates, self.clipping_threshold)
        scale = jnp.maximum(rms(params), self.epsilon2_param_scale_reg) if self.multiply_by_parameter_scale else 1.0
        updates = [rate * scale * update for update in updates]
        if self.beta1:
            past = self._momenta(weight, momentum, momentum_scale)
            updates = [self.beta1 * m + (1 - self.beta1) * u for m, u in zip(past, updates, strict=True)]
            momentum, momentum_scale = self._store_momenta(weight, updates)
        weight_decay = self.weight_decay if self.decay_norms_and_biases or weight.is_matrix else 0.0
        updates = [u + rate * weight_decay * param for u, param in zip(updates, params, strict=True)]
        return updates, momentum, momentum_scale, *new_second_moments

    def _scale(self, weight: Weight, decay: Any, grad: jax.Array, row: Any, column: Any, full: Any) -> tuple[Any, ...]:
        """A gradient divided by the root of its second moment, and the new second moment: `row`, `column`, `full`."""
        squared = jnp.square(grad) + self.epsilon1_grad_sq_reg
        dims = self._factored_dims(weight, grad.shape)
        if dims is None:
            full = decay * full + (1 - decay) * squared
            return grad / jnp.sqrt(full), row, column, full
        over_row, over_column = dims
        row = decay * row + (1 - decay) * jnp.mean(squared, axis=over_row)
        column = decay * column + (1 - decay) * jnp.mean(squared, axis=over_column)
        mean = jnp.mean(row, axis=over_column - (over_column > over_row), keepdims=True)
        scale = jnp.sqrt(jnp.expand_dims(row / mean, over_row) * jnp.expand_dims(column, over_column))
        return grad / scale, row, column, full

    def _momenta(self, weight: Weight, stored: list[jax.Array], scales: list) -> list[jax.Array]:
        """The momenta of tensors that count as one, in float32."""
        momenta = [one.astype(jnp.float32) for one in stored]
        if self.momentum_dtype != "int8" or momenta[0].ndim == 0:
            return momenta
        scale = scales[0] if len(momenta) > 1 else jnp.expand_dims(scales[0], _praxis_dims(weight)[0])
        return [momentum * scale for momentum in momenta]

    def _store_momenta(self, weight: Weight, momenta: list[jax.Array]) -> tuple[list, list]:
        """The stored momenta of tensors that count as one, and their scales: the first one has that of all."""
        none = [optax.MaskedNode() for _ in momenta]
        if self.momentum_dtype != "int8" or momenta[0].ndim == 0:
            dtype = "float32" if self.momentum_dtype == "int8" else self.momentum_dtype
            return [momentum.astype(dtype) for momentum in momenta], none
        if len(momenta) > 1:
            scale = unit = functools.reduce(jnp.maximum, map(jnp.abs, momenta)) / 127
        else:
            first = _praxis_dims(weight)[0]
            scale = jnp.max(jnp.abs(momenta[0]), axis=first) / 127
            unit = jnp.expand_dims(scale, first)
        unit = jnp.where(unit > 0, unit, 1.0)
        return [jnp.round(momentum / unit).astype(jnp.int8) for momentum in momenta], [scale, *none[1:]]

    def _factored_dims(self, weight: Weight, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The dimensions that the row and the column moment average over; None for an unfactored tensor."""
        if not self.factored or len(shape) < 2:
            return None
        order = _praxis_dims(weight)
        if not self.sort_factored_second_moment_dims:
            return order[-1], order[-2]
        largest, second = sorted(order, key=lambda dim: -shape[dim])[:2]
        return (largest, second) if shape[second] >= self.min_dim_size_to_factor else None


def _praxis_dims(weight: Weight) -> list[int]:
    """The dimensions of a weight in the order in which praxis stores them."""
    matmul = (*weight.contracts, *weight.produces)
    if weight.is_table and "vocab" in weight.axes:
        matmul = (*weight.produces, *weight.contracts)  # in praxis, the tied output projection [D, V] is the table
    others = [dim for dim in range(len(weight.axes)) if dim not in matmul]
    return sorted([*others, *matmul], key=lambda dim: weight.axes[dim] in ("heads", "kv_heads", "head_dim"))
