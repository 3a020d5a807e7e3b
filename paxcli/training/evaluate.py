"""Metrics of a model over the evaluation inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jax.sharding import Mesh

from paxcli.inputs.base_input import BaseInput
from paxcli.mesh.sharding import put_batch
from paxcli.training.task import Metrics


def evaluate(
    eval_step: Callable, params: dict, inputs: Iterable[BaseInput], mesh: Mesh, metrics: Metrics
) -> dict[str, dict[str, float]]:
    """Metrics over one evaluation run of each input: input name → metric → value."""
    return {str(source.name): _evaluate_one(eval_step, params, source, mesh, metrics) for source in inputs}


def _evaluate_one(
    eval_step: Callable, params: dict, source: BaseInput, mesh: Mesh, metrics: Metrics
) -> dict[str, float]:
    total = None
    for batch in source.eval_batches():
        sums = eval_step(params, put_batch(batch, mesh))
        total = sums if total is None else metrics.combined(total, sums)
    if total is None:
        return {}
    return {name: float(value) / max(float(weight), 1e-6) for name, (value, weight) in total.items()}
