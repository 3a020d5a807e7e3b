"""Trust ratios per layer, which LAMB and LARS share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.mesh.weights import groups_of
from paxcli.optim.base import vmap_layers


def scale_by_trust_ratio(weights: Any, trust_coefficient: float = 1.0, epsilon: float = 0.0) -> Any:
    """Multiplies each update by norm(parameter) / norm(update), where both are positive.

    Norms are per layer of a stack, and over the weights of a group, such as query, key and value.

    Args:
      weights: A tree like the parameters of the `Weight` of each.
      trust_coefficient: Multiplies the ratio.
      epsilon: Added to the norm of the update.
    """
    scale = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=epsilon)

    def scale_group(updates: list[jax.Array], params: list[jax.Array]) -> list[jax.Array]:
        params_of_group = jnp.stack(params)
        scaled: Any = scale.update(jnp.stack(updates), optax.EmptyState(), params_of_group)[0]
        return list(scaled)

    def update(updates: Any, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        facts, values = jax.tree.leaves(weights), jax.tree.leaves(params)
        for numbers in groups_of(weights):
            scale_layers = vmap_layers(facts[numbers[0]], scale_group)
            scaled = scale_layers([leaves[number] for number in numbers], [values[number] for number in numbers])
            for number, leaf in zip(numbers, scaled, strict=True):
                leaves[number] = leaf
        return jax.tree.unflatten(structure, leaves)

    return optax.stateless(update)
