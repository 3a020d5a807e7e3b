"""What the learner asks of an optimizer."""

from __future__ import annotations

import dataclasses

import optax

from paxcli.config.configurable import Configurable


@dataclasses.dataclass(frozen=True)
class Optimizer(Configurable):
    """Turns gradients into updates that still lack the learning rate and the minus sign."""

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation. The learner scales its updates by minus the learning rate."""
        raise NotImplementedError
