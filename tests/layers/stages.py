"""Parameters of a stack, split into the stages of a pipeline."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def to_stages(params: Any, num_stages: int, circular_repeat: int = 1) -> dict[str, Any]:
    """The parameters of a `Stack` as those of a `PipelinedStack`: the inverse of `to_layers`."""
    lead = (circular_repeat, num_stages) if circular_repeat > 1 else (num_stages,)
    if "layers" in params:
        stages = {"layers": jax.tree.map(lambda p: p.reshape(*lead, -1, *p.shape[1:]), params["layers"])}
    else:
        layers = [params[f"layers_{i}"] for i in range(len(params))]
        size = len(layers) // math.prod(lead)
        stages = {
            f"layers_{k}": jax.tree.map(lambda *ps: jnp.stack(ps).reshape(*lead, *ps[0].shape), *layers[k::size])
            for k in range(size)
        }
    return {"repeats": {"stages": stages}} if circular_repeat > 1 else {"stages": stages}
