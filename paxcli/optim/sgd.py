"""Stochastic gradient descent."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from paxcli.config.fields import DecayRate
from paxcli.optim.base import Optimizer, check_nesterov


@dataclasses.dataclass(frozen=True)
class Sgd(Optimizer):
    """Gradient descent, optionally with momentum.

    Attributes:
      momentum: Decay of the running sum of gradients; None = no momentum.
      nesterov: Whether to use Nesterov momentum; requires `momentum`.
    """

    momentum: DecayRate | None = None
    nesterov: bool = False

    def validate(self) -> None:
        check_nesterov(self.nesterov, self.momentum)

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        return optax.identity() if self.momentum is None else optax.trace(self.momentum, self.nesterov)
