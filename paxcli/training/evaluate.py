"""Metrics of a model over the evaluation inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxcli.inputs.base_input import BaseInput
from paxcli.mesh.sharding import put_batch


def evaluate(eval_step: Callable, params: dict, inputs: Iterable[BaseInput], mesh: Mesh) -> dict[str, dict[str, float]]:
    """Weighted means over one evaluation run of each input: input name → metric → value."""
    return {str(source.name): _evaluate_one(eval_step, params, source, mesh) for source in inputs}


def _evaluate_one(eval_step: Callable, params: dict, source: BaseInput, mesh: Mesh) -> dict[str, float]:
    total = None
    for batch in source.eval_batches():
        sums = eval_step(params, put_batch(batch, mesh))
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    if total is None:
        return {}
    return {name: float(value) / max(float(weight), 1e-6) for name, (value, weight) in total.items()}
