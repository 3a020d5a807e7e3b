"""Optimizers whose updates follow the size of each layer's weights: LAMB and LARS."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat, PositiveFloat
from paxcli.mesh.weights import Weight
from paxcli.optim.base import Optimizer, add_decay, check_nesterov, map_groups, multiply_by_learning_rate


@dataclasses.dataclass(frozen=True)
class Lamb(Optimizer):
    """Adam whose update of each layer's weight is as large as the weight (You et al., 2020; Pax: the same name).

    The update, weight decay included, is multiplied by norm(weight) / norm(update).

    Attributes:
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      epsilon: Added to the square root of the second moment.
      epsilon_root: Added to the second moment under the square root.
      weight_decay: Weight decay, part of the update that is scaled; 0 = none.
      decay_norms_and_biases: Whether scales and biases decay too, as in Pax.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegativeFloat = 1e-6
    epsilon_root: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = True

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, self.epsilon_root)
        return optax.chain(adam, add_decay(self, weights), _scale_by_trust_ratio(weights))


@dataclasses.dataclass(frozen=True)
class Lars(Optimizer):
    """Momentum of gradients whose size in each layer follows that of the weight (You et al., 2017; Pax: the same name).

    Order: weight decay, trust ratio, learning rate, momentum.

    Attributes:
      momentum: Decay of the running sum of updates.
      nesterov: Whether to use Nesterov momentum; requires `momentum`.
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

    def validate(self) -> None:
        check_nesterov(self.nesterov, self.momentum)

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        ratio = _scale_by_trust_ratio(weights, self.trust_coefficient, self.epsilon)
        rate = optax.GradientTransformationExtraArgs(optax.init_empty_state, multiply_by_learning_rate)
        return optax.chain(add_decay(self, weights), ratio, rate, optax.trace(self.momentum, self.nesterov))


def _scale_by_trust_ratio(weights: Any, trust_coefficient: float = 1.0, epsilon: float = 0.0) -> Any:
    """Multiplies each update by norm(parameter) / norm(update), where both are positive.

    Norms are per layer of a stack, and over the weights of a group, such as query, key and value.

    Args:
      weights: A tree like the parameters of the `Weight` of each.
      trust_coefficient: Multiplies the ratio.
      epsilon: Added to the norm of the update.
    """
    scale = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=epsilon)

    def scale_group(_: Weight, updates: list[jax.Array], params: list[jax.Array]) -> tuple[list[jax.Array]]:
        scaled: Any = scale.update(jnp.stack(updates), optax.EmptyState(), jnp.stack(params))[0]
        return (list(scaled),)

    return optax.stateless(lambda updates, params: map_groups(scale_group, weights, updates, params)[0])
