"""The compiled steps: one update, and one evaluation batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.errors import ConfigError
from paxcli.inputs.nested_map import NestedMap
from paxcli.training.noise import add_noise
from paxcli.training.state import TrainState
from paxcli.training.task import SingleTask

TrainStep = Callable[[TrainState, NestedMap], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(task: SingleTask, abstract: TrainState) -> jax.stages.Wrapped:
    """The jitted `(state, batch) -> (state, metrics)`. The old state's memory is reused for the new one.

    Call it under `use_mesh`. The metrics stay on the device: `loss`, every metric of the model, `learning_rate`,
    `grad_norm`, `param_norm` and `skipped_steps`.
    """

    def train_step(state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        noise_key, model_key = jax.random.split(key)

        def loss_of(params: dict, rows: NestedMap):
            return task.loss(add_noise(params, task.vn, state.step, noise_key), rows, model_key)

        grads, metrics = _gradients(loss_of, state.params, batch, task.train.num_microbatches)
        params, opt_state, learned = task.train.learner.update(grads, state.opt_state, state.params, state.step)
        skipped = state.skipped_steps + ~learned.pop("valid")
        metrics = (
            task.metrics.reported(metrics) | learned | {"param_norm": optax.tree.norm(params), "skipped_steps": skipped}
        )
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, skipped_steps=skipped), metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def _gradients(loss_of: Callable, params: dict, batch: NestedMap, num_microbatches: int) -> tuple[dict, dict]:
    """Gradients and metrics of the mean loss over a batch, taken in `num_microbatches` slices one after the other.

    Each slice counts by its weight, so the result does not depend on how the batch is cut.
    """
    gradient = jax.grad(loss_of, has_aux=True)

    def of_slice(rows: NestedMap) -> tuple[dict, dict, jax.Array]:
        grads, (weight, metrics) = gradient(params, rows)
        return grads, metrics, weight

    if num_microbatches == 1:
        grads, metrics, _ = of_slice(batch)
        return grads, {name: value for name, (value, _) in metrics.items()}

    def add(total, rows):
        grads, metrics, weight = of_slice(rows)
        weighted = jax.tree.map(lambda g: g * weight, grads)
        sums = {name: (value * w, w) for name, (value, w) in metrics.items()}
        return jax.tree.map(jnp.add, total, (weighted, sums, weight)), None

    # Microbatch m takes rows m, m + M, …: every device keeps the rows that it has.
    slices = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_microbatches, *x.shape[1:]), 1, 0), batch)
    shapes = jax.eval_shape(of_slice, jax.tree.map(lambda x: x[0], slices))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (grads, sums, weight), _ = jax.lax.scan(add, zeros, slices)
    grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-6), grads)
    return grads, {name: value / jnp.maximum(w, 1e-6) for name, (value, w) in sums.items()}


def make_eval_step(task: SingleTask) -> jax.stages.Wrapped:
    """Compiles `(params, batch) -> {metric: (sum, weight)}`: combine these over batches, then divide."""
    return jax.jit(lambda params, batch: _evaluated(task, params, batch)[0])


def make_score_step(task: SingleTask) -> Callable[[dict, NestedMap], tuple[dict, dict[str, jax.Array]]]:
    """Compiles `(params, batch) ->` what an eval step returns, and `example_id` and `scores` of all examples, [B]."""

    def score_step(params: dict, batch: NestedMap) -> tuple[dict, dict[str, jax.Array]]:
        sums, examples = _evaluated(task, params, batch)
        if "scores" not in examples:
            raise ConfigError(f"{type(task.model).__name__} has no `scores`, which metrics of an evaluation need.")
        found = {"example_id": batch.example_id, "scores": examples.scores}
        whole = jax.sharding.PartitionSpec()  # so that each process can read those of all
        return sums, jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, whole), found)

    return jax.jit(score_step)


def _evaluated(task: SingleTask, params: dict, batch: NestedMap) -> tuple[dict, Any]:
    metrics, examples = task.model.measured(task.model.cast(params), batch)
    loss, weight = task.loss_aggregator(metrics)
    return task.metrics.of_batch(metrics | {"loss": (loss, weight)}), examples
