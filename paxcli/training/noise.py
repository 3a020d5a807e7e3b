"""Variational noise on the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from paxcli.layers.scopes import NOISE
from paxcli.mesh.weights import match_parameters, parameter_names
from paxcli.training.task import VariationalNoise


@jax.named_scope(NOISE)
def add_noise(params: dict, noise: VariationalNoise | None, step: jax.Array, key: jax.Array) -> dict:
    """Adds Gaussian noise to the parameters that `noise.regex` matches.

    Raises:
      ConfigError: The regex matches no parameter.
    """
    if noise is None:
        return params
    values, structure = jax.tree.flatten(params)
    names = parameter_names(params)
    chosen = [True] * len(names) if noise.regex is None else match_parameters("vn.regex", noise.regex, names)
    scale = jnp.where(step >= noise.start_step, noise.scale, 0.0)
    keys = jax.random.split(key, len(values))
    noisy = [
        value + scale * jax.random.normal(k, value.shape, value.dtype) if use else value
        for value, use, k in zip(values, chosen, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)
