"""LARS."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveFloat
from paxcli.optim.base import Optimizer, decay_mask
from paxcli.optim.trust_ratio import scale_by_trust_ratio


@dataclasses.dataclass(frozen=True)
class Lars(Optimizer):
    """Momentum of gradients whose size in each layer follows that of the weight (You et al., 2017; Pax: the same name).

    Order: weight decay, trust ratio, learning rate, momentum.

    Attributes:
      momentum: Decay of the running sum of updates.
      nesterov: Whether to use Nesterov momentum.
      trust_coefficient: Size of an update before the momentum, relative to the weight.
      epsilon: Added to the norm of the gradient.
      weight_decay: Added to the gradient, times the weight; 0 = none.
      decay_norms_and_biases: Whether scales and biases decay too, as in Pax.
    """

    momentum: DecayRate = 0.9
    nesterov: bool = False
    trust_coefficient: PositiveFloat = 0.001
    epsilon: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = True

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        mask = None if self.decay_norms_and_biases else decay_mask(weights)
        return optax.with_extra_args_support(
            optax.chain(
                optax.add_decayed_weights(self.weight_decay, mask),
                scale_by_trust_ratio(weights, self.trust_coefficient, self.epsilon),
                optax.GradientTransformationExtraArgs(optax.init_empty_state, _multiply_by_learning_rate),
                optax.trace(self.momentum, self.nesterov),
            )
        )


def _multiply_by_learning_rate(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
    return jax.tree.map(lambda u: extra_args["learning_rate"] * u, updates), state
