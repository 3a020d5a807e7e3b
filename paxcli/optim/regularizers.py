"""Penalties on the parameters, added to gradients or to updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def l1_penalty(weight: float, mask: Any) -> optax.GradientTransformation:
    """Adds to the gradient that of `weight * sum(|parameter|)`.

    Args:
      weight: Weight of the penalty in the loss.
      mask: A tree like the parameters of whether each is penalized; None = all.
    """
    penalty = optax.stateless(lambda grads, params: optax.tree.add_scale(grads, weight, jax.tree.map(jnp.sign, params)))
    return penalty if mask is None else optax.masked(penalty, mask)


class EwcState(NamedTuple):
    """The parameters at the start of the run, which the penalty pulls back to."""

    anchor: Any


def elastic_weight_consolidation(weight: float) -> optax.GradientTransformationExtraArgs:
    """Pulls parameters back to those at the start of the run (EWC, Kirkpatrick et al., 2017).

    As in praxis, the penalty is decoupled from the optimizer: it adds `learning_rate * weight / 2 * (parameter -
    anchor)` to what is subtracted from the parameters.

    Args:
      weight: Weight of the penalty.
    """

    def init(params: Any) -> EwcState:
        return EwcState(jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, EwcState]:
        rate = extra_args["learning_rate"] * weight / 2
        return jax.tree.map(lambda u, p, a: u + rate * (p - a), updates, params, state.anchor), state

    return optax.GradientTransformationExtraArgs(init, update)
