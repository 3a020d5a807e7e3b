"""What the learner asks of an optimizer."""

from __future__ import annotations

import dataclasses

import jax
import optax

from paxcli.config.configurable import Configurable


@dataclasses.dataclass(frozen=True)
class Optimizer(Configurable):
    """Turns gradients into updates that still lack the learning rate and the minus sign."""

    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation. The learner scales its updates by minus the learning rate."""
        raise NotImplementedError


def stacked_dims(path: tuple[jax.tree_util.DictKey, ...]) -> int:
    """How many leading dimensions of the parameter at `path` count layers, so that each layer can be kept apart.

    `layers`, `stages` and `repeats` in a path each stand for one.
    """
    return sum(getattr(key, "key", None) in ("layers", "stages", "repeats") for key in path)
