"""Evaluation: metrics of a model on the evaluation inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
from jax.sharding import Mesh

from paxcli.inputs.base_input import BaseInput
from paxcli.mesh.sharding import put_batch
from paxcli.training.task import Metrics


def evaluate(
    eval_step: Callable,
    params: dict,
    inputs: Iterable[BaseInput],
    mesh: Mesh,
    metrics: Metrics,
    score_step: Callable | None = None,
    check_stop: Callable[[int], None] | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of one evaluation run on each input: input name → metric → value.

    With a `score_step`, inputs with metrics of their own also compute those, from the scores of their examples.
    `check_stop` is called before each batch with its number; it raises an exception to end the evaluation.
    """
    check_stop = check_stop or (lambda _: None)
    return {
        str(source.name): _evaluate_one(eval_step, params, source, mesh, metrics, score_step, check_stop)
        for source in inputs
    }


def _evaluate_one(
    eval_step: Callable,
    params: dict,
    source: BaseInput,
    mesh: Mesh,
    metrics: Metrics,
    score_step: Callable | None,
    check_stop: Callable[[int], None],
) -> dict[str, float]:
    of_scores = source.example_metrics("scores") if score_step is not None else None
    total, scored = None, []
    for number, batch in enumerate(source.eval_batches()):
        check_stop(number)
        batch = put_batch(batch, mesh)
        if of_scores is None or score_step is None:
            sums = eval_step(params, batch)
        else:
            sums, examples = score_step(params, batch)
            scored.append(examples)
        before, total = total, sums if total is None else metrics.combine(total, sums)
        jax.block_until_ready(before)  # one batch computes while the next is read, so that a stop takes effect soon
    if total is None:
        return {}
    values = {name: float(value) / max(float(weight), 1e-6) for name, (value, weight) in total.items()}
    return values if of_scores is None else values | of_scores(_by_example(scored))


def _by_example(batches: list[dict[str, jax.Array]]) -> dict[int, float]:
    """`example_id` → score; rows with a negative id are padding."""
    pairs = [
        (int(number), float(score))
        for batch in jax.device_get(batches)
        for number, score in zip(batch["example_id"], batch["scores"], strict=True)
    ]
    return {number: score for number, score in pairs if number >= 0}
