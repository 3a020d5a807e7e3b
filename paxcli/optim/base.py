"""The optimizer interface that the learner calls, and groups of parameters with an optimizer of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable
from paxcli.config.fields import PositiveFloat
from paxcli.errors import ConfigError
from paxcli.mesh.weights import groups_of
from paxcli.optim.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Optimizer(Configurable):
    """Turns gradients into the direction that is subtracted from the parameters.

    Methods take `weights`, a tree like the parameters that holds the `Weight` of each: which of its dimensions are
    contracted and produced, and how many stack layers.
    """

    def validate(self) -> None:
        """Raises a ConfigError when fields contradict each other."""

    def transformation(self, weights: Any) -> optax.GradientTransformation:
        """The optax transformation of gradients into a direction, without the learning rate and the minus sign.

        `optax.scale_by_adam()`, for example. `optax.adam(1e-3)` has both already: with it, the loss would rise.
        """
        raise NotImplementedError

    def with_learning_rate(self, weights: Any) -> optax.GradientTransformationExtraArgs:
        """The direction times the extra argument `learning_rate`: what the learner subtracts from the parameters.

        An optimizer whose state depends on the learning rate overrides this.
        """
        direction = self.transformation(weights)

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            return multiply_by_learning_rate(*direction.update(updates, state, params), **extra_args)

        return optax.GradientTransformationExtraArgs(direction.init, update)


@dataclasses.dataclass(frozen=True)
class ParameterGroup(Configurable):
    """Parameters that the learner updates in a way of their own (Pax: an entry of `MultiOptimizerLearner`).

    Attributes:
      regex: Regular expression. The group has the parameters whose path, such as `stack/layers/attention/query`,
        matches anywhere.
      optimizer: Their optimizer; None = the learner's, with a state of its own.
      learning_rate_multiplier: Multiplies the learner's `learning_rate`.
      schedule: Their schedule; None = the learner's.
    """

    regex: str
    optimizer: Optimizer | None = None
    learning_rate_multiplier: PositiveFloat = 1.0
    schedule: Schedule | None = None


def check_nesterov(nesterov: bool, momentum: float | None) -> None:
    """Raises a ConfigError for Nesterov momentum without momentum."""
    if nesterov and not momentum:
        raise ConfigError("optimizer: `nesterov` has no effect without `momentum`.", "Set `momentum`, such as 0.9.")


def multiply_by_learning_rate(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
    """The update of a transformation that multiplies by the extra argument `learning_rate`, and keeps its state."""
    return jax.tree.map(lambda u: extra_args["learning_rate"] * u, updates), state


def decay_mask(weights: Any, norms_and_biases: bool = False) -> Any:
    """Mask of the parameters that decay: those that are contracted with activations.

    Args:
      weights: A tree like the parameters of the `Weight` of each.
      norms_and_biases: Whether norms and biases decay too; the mask is then None: all parameters.
    """
    return None if norms_and_biases else jax.tree.map(lambda weight: weight.is_matrix, weights)


def add_decay(optimizer: Any, weights: Any) -> optax.GradientTransformation:
    """Adds the weight decay of an optimizer with `weight_decay` and `decay_norms_and_biases` to its updates."""
    return optax.add_decayed_weights(optimizer.weight_decay, decay_mask(weights, optimizer.decay_norms_and_biases))


def map_groups(function: Callable[..., Any], weights: Any, *trees: Any, by_layer: bool = True) -> tuple[Any, ...]:
    """Maps a function over groups of weights, such as query, key and value, and over the layers of a stack.

    Args:
      function: From the `Weight` of a group, and for each tree the list of its values in the group and one layer, to
        tuples of such lists.
      weights: A tree like the parameters of the `Weight` of each.
      trees: Trees like the parameters. A value may be `optax.MaskedNode`.
      by_layer: Whether each layer of a stack counts by itself; otherwise the function gets all of them at once.

    Returns:
      A tree like the parameters for each list that the function returns.
    """
    facts, structure = jax.tree.flatten(weights)
    leaves = [structure.flatten_up_to(tree) for tree in trees]
    results: list[Any] = [None] * len(facts)
    for numbers in groups_of(weights):
        of_layer: Callable = functools.partial(function, facts[numbers[0]])
        for _ in range(facts[numbers[0]].num_stacked if by_layer else 0):
            of_layer = jax.vmap(of_layer)
        lists = of_layer(*([values[number] for number in numbers] for values in leaves))
        for number, *values in zip(numbers, *lists, strict=True):
            results[number] = values
    return tuple(map(structure.unflatten, zip(*results, strict=True)))


def corrected_decay(beta: float, count: jax.Array) -> jax.Array:
    """The decay rate of update `count` (from 1) that leaves a moving average unbiased (Shazeer and Stern, 2018)."""
    steps = count.astype("float32")
    return beta * (1 - beta ** (steps - 1)) / (1 - beta**steps)


def rms(tensors: list[jax.Array]) -> jax.Array:
    """The root-mean-square over tensors of one shape."""
    return jnp.sqrt(sum(jnp.mean(jnp.square(x)) for x in tensors) / len(tensors))


def clip_rms(updates: list[jax.Array], largest: float) -> list[jax.Array]:
    """The updates of tensors that count as one, scaled to a root-mean-square of at most `largest`."""
    divisor = jnp.maximum(1.0, rms(updates) / largest)
    return [update / divisor for update in updates]
