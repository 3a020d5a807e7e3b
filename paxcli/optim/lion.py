"""Lion."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat
from paxcli.optim.base import Optimizer, add_decay


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023).

    Its learning rate is typically 3 to 10 times smaller than that of AdamW, and its weight decay as much larger.

    Attributes:
      beta1: Weight of the momentum in the interpolation with the gradient, whose sign is the update.
      beta2: Decay of the momentum.
      weight_decay: Weight decay, multiplied by the learning rate; 0 = none.
      mu_dtype: Dtype of the momentum; Pax's is bfloat16.
      decay_norms_and_biases: Whether scales and biases decay too.
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    weight_decay: NonNegativeFloat = 1e-3
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    decay_norms_and_biases: bool = False

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        lion = optax.scale_by_lion(self.beta1, self.beta2, mu_dtype=self.mu_dtype)
        return optax.chain(lion, add_decay(self, weights))
