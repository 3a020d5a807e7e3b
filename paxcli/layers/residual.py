"""How the residual lies, and what products read of it, on the meshes where the two have to differ.

`mesh/sharding.py` says which these are. On all others XLA is left to choose, which does better.
"""

from __future__ import annotations

import jax
from jaxtyping import Float

from paxcli.layers.remat import save_as
from paxcli.mesh.sharding import constrain, layout

_ROWS = ("activation_batch", "activation_length")
_RESIDUAL, _FACTOR = (*_ROWS, "activation_residual"), (*_ROWS, "activation_embed")


def as_residual(x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
    """`x` as it is kept between layers, under its name for remat."""
    return save_as("layer_input", constrain(x, *_RESIDUAL) if _differ(x) else x)


def as_factor(x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
    """`x` as a product with weights takes it."""
    return constrain(x, *_FACTOR) if _differ(x) else x


def _differ(x: jax.Array) -> bool:
    return layout(x.shape, *_RESIDUAL) != layout(x.shape, *_FACTOR)
