"""Any optimizer of optax, or written for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from paxcli.optim.base import Optimizer


@dataclasses.dataclass(frozen=True)
class Optax(Optimizer):
    """An optax optimizer, such as `Optax.config(factory=fdl.Partial(optax.lion, b1=0.95))`.

    Attributes:
      factory: Makes the transformation from `learning_rate=`, which the learner gives it. Every optimizer of optax is
        one, and so is a function of your own that returns an `optax.chain`.
    """

    factory: Callable[..., optax.GradientTransformation]

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        def init(params: Any) -> Any:
            return self.factory(learning_rate=0.0).init(params)

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            optimizer = self.factory(learning_rate=extra_args["learning_rate"])
            updates, state = optimizer.update(updates, state, params)
            return jax.tree.map(jax.numpy.negative, updates), state  # optax adds updates, the learner subtracts them

        return optax.GradientTransformationExtraArgs(init, update)
