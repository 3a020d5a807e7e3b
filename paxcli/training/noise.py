"""Variational noise on the parameters."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from paxcli.errors import ConfigError
from paxcli.layers.scopes import NOISE
from paxcli.training.task import VariationalNoise


@jax.named_scope(NOISE)
def add_noise(params: dict, noise: VariationalNoise | None, step: jax.Array, key: jax.Array) -> dict:
    """Adds Gaussian noise to the parameters that `noise.regex` matches.

    Raises:
      ConfigError: The regex matches no parameter.
    """
    if noise is None:
        return params
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    names = ["/".join(str(part.key) for part in path) for path, _ in flat]
    chosen = [noise.regex is None or re.search(noise.regex, name) is not None for name in names]
    if not any(chosen):
        raise ConfigError(f"vn.regex {noise.regex!r} matches no parameter.", f"Parameters: {', '.join(names[:8])}, …")
    scale = jnp.where(step >= noise.start_step, noise.scale, 0.0)
    keys = jax.random.split(key, len(flat))
    noisy = [
        value + scale * jax.random.normal(k, value.shape, value.dtype) if use else value
        for (_, value), use, k in zip(flat, chosen, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)
