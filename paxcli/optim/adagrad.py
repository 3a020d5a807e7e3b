"""Adagrad."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from paxcli.config.fields import NonNegativeFloat
from paxcli.optim.base import Optimizer


@dataclasses.dataclass(frozen=True)
class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of all their squares (Duchi et al., 2011; Pax: `Adagrad`).

    Attributes:
      initial_accumulator_value: Initial value of that sum.
      epsilon: Added to the sum under the root, as in optax.
    """

    initial_accumulator_value: NonNegativeFloat = 0.1
    epsilon: NonNegativeFloat = 1e-10

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        return optax.scale_by_rss(self.initial_accumulator_value, self.epsilon)
