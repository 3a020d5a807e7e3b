"""Adam with the update rule of Pax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveFloat
from paxcli.optim.base import Optimizer, add_decay, clip_rms, corrected_decay, map_groups


class AdamState(NamedTuple):
    """The number of updates, and both moments, already bias-corrected."""

    count: jax.Array
    first_moment: dict
    second_moment: dict


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias-corrected moments and clipped updates (Pax: `praxis.optimizers.ShardedAdam`).

    The decay rates are corrected as in Adafactor (Shazeer and Stern, 2018, section 7.1). Order: moments, clip, weight
    decay.

    Attributes:
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      epsilon: Added to the square root of the second moment.
      epsilon_root: Added to the second moment under the square root.
      clip_threshold: Largest root-mean-square of a parameter's update, per layer, and over query, key and value
        together where these count as one (`Attention.combine_qkv`); None = off.
      weight_decay: Weight decay, multiplied by the learning rate; 0 = none.
      decay_norms_and_biases: Whether scales and biases decay too, as in Pax.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    epsilon: NonNegativeFloat = 1e-6
    epsilon_root: NonNegativeFloat = 0.0
    clip_threshold: PositiveFloat | None = 1.0
    weight_decay: NonNegativeFloat = 1e-3
    decay_norms_and_biases: bool = True

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        return optax.GradientTransformation(self._init, functools.partial(self._update, weights))

    def _init(self, params: Any) -> AdamState:
        return AdamState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def _update(self, weights: Any, updates: Any, state: Any, params: Any = None) -> tuple[Any, AdamState]:
        count = state.count + 1
        beta1, beta2 = corrected_decay(self.beta1, count), corrected_decay(self.beta2, count)
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first_moment, updates)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.second_moment, updates)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + self.epsilon_root) + self.epsilon), first, second)
        if self.clip_threshold is not None:
            (steps,) = map_groups(lambda _, group: (clip_rms(group, self.clip_threshold),), weights, steps)
        decay = add_decay(self, weights)
        return decay.update(steps, decay.init(params), params)[0], AdamState(count, first, second)
