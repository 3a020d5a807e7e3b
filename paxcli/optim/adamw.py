"""AdamW, the usual optimizer of language models."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat
from paxcli.optim.base import Optimizer, add_decay


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), multiplied by the learning rate.

    Attributes:
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      epsilon: Added to the square root of the second moment.
      weight_decay: Weight decay, multiplied by the learning rate; 0 = none.
      mu_dtype: Dtype of the first moment.
      decay_norms_and_biases: Whether scales and biases decay too.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.95
    epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    decay_norms_and_biases: bool = False

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, mu_dtype=self.mu_dtype)
        return optax.chain(adam, add_decay(self, weights))
