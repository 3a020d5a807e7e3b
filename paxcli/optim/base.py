"""What the learner asks of an optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from paxcli.config.configurable import Configurable


@dataclasses.dataclass(frozen=True)
class Optimizer(Configurable):
    """Turns gradients into what is taken off the parameters."""

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation to a direction, which still lacks the learning rate and the minus sign."""
        raise NotImplementedError

    def scaled(self) -> optax.GradientTransformationExtraArgs:
        """The direction times the extra argument `learning_rate`: what the learner takes off the parameters.

        An optimizer whose state depends on the learning rate overrides this.
        """
        direction = self.transformation()

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            updates, state = direction.update(updates, state, params)
            return jax.tree.map(lambda u: extra_args["learning_rate"] * u, updates), state

        return optax.GradientTransformationExtraArgs(direction.init, update)


def is_matrix_weight(path: tuple, _: Any = None) -> bool:
    """Whether a parameter multiplies activations, by its name: norms' scales and biases do not."""
    name = path[-1].key
    return not (name.startswith("b_") or name == "b" or name.endswith(("bias", "scale")))


def stacked_dims(path: tuple[jax.tree_util.DictKey, ...]) -> int:
    """How many leading dimensions of the parameter at `path` count layers, so that each layer can be kept apart.

    `layers`, `stages` and `repeats` in a path each stand for one.
    """
    return sum(getattr(key, "key", None) in ("layers", "stages", "repeats") for key in path)


def corrected_decay(beta: float, count: jax.Array) -> jax.Array:
    """The decay rate of update `count` (from 1) that leaves a moving average unbiased (Shazeer and Stern, 2018)."""
    steps = count.astype("float32")
    return beta * (1 - beta ** (steps - 1)) / (1 - beta**steps)
