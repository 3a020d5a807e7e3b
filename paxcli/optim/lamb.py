"""LAMB."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from paxcli.config.fields import DecayRate, NonNegativeFloat
from paxcli.optim.base import Optimizer, decay_mask
from paxcli.optim.trust_ratio import scale_by_trust_ratio


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
        mask = None if self.decay_norms_and_biases else decay_mask(weights)
        return optax.chain(
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon, self.epsilon_root),
            optax.add_decayed_weights(self.weight_decay, mask),
            scale_by_trust_ratio(weights),
        )
