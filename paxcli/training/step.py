"""The compiled steps: one update, one evaluation batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.errors import ConfigError
from paxcli.layers.fp8 import accumulating
from paxcli.layers.scopes import GRADIENT_ACCUMULATION, METRICS, OPTIMIZER
from paxcli.mesh.compiler_options import Options
from paxcli.metrics.meter import RESERVED
from paxcli.nested_map import NestedMap, num_rows
from paxcli.training.learner import replace_trained
from paxcli.training.state import TrainState, without_reference
from paxcli.training.summaries import step_summaries
from paxcli.training.task import SingleTask

# Of some rows: FP8 state, activations, gradients, metrics as (value, weight), and the weight of the gradients.
Slice = tuple[Any, dict, dict, dict, jax.Array]
TrainStep = Callable[[TrainState, NestedMap], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(task: SingleTask, abstract: TrainState, options: Options | None = None) -> jax.stages.Wrapped:
    """The jitted train step `(state, batch) -> (state, metrics)`. It donates the old state.

    Call it under `use_mesh`. The metrics stay on the device: `loss`, every metric of the model, `learning_rate`,
    `grad_norm`, `param_norm` and `skipped_steps`.
    """

    def train_step(state: TrainState, batch: NestedMap) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        noise_key, model_key = jax.random.split(key)

        def loss_of(trained: dict, fp8: Any, rows: NestedMap):
            return task.loss(replace_trained(cast, trained), rows, model_key, accumulating(fp8))

        # Gradients have the dtype of the cast parameters: in bfloat16, half the memory, and no computed bit is lost.
        noisy = state.params if task.vn is None else task.vn.add_to(state.params, state.step, noise_key)
        cast, learner = task.model.cast(noisy), task.train.learner
        weights = jax.tree.unflatten(jax.tree.structure(state.params), state.weights)
        trained, private = learner.select_trained(cast), learner.stochastic_gradient
        gradient = jax.grad(loss_of, argnums=(0, 1), has_aux=True)

        def of_slice(rows: NestedMap) -> Slice:
            (grads, new_fp8), (weight, metrics, activations) = gradient(trained, state.fp8, rows)
            if learner.clip_each_microbatch:
                norm = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
                grads, weight = learner.clip(grads, norm, learner.select_trained(weights)), jnp.ones_like(weight)
            return new_fp8, activations, grads, metrics, weight

        of_rows = of_slice if private is None else private.clip_examples(of_slice)
        grads, fp8, metrics, num_predictions, activations = _gradients(of_rows, batch, task.train.num_microbatches)
        if private is not None:
            grads = private.add_noise(grads, num_rows(batch), jax.random.split(key, 3)[2])
        with jax.named_scope(OPTIMIZER):
            params, opt_state, learned = learner.update(grads, state.opt_state, state.params, state.step, weights)
        valid = learned.pop("valid")
        fp8 = jax.tree.map(lambda new, old: jnp.where(valid, new, old), fp8, state.fp8)
        skipped = state.skipped_steps + ~valid
        with jax.named_scope(METRICS):
            norm = optax.tree.norm(without_reference(params))
        reported, own = task.metrics.select_reported(metrics), learned | {"param_norm": norm, "skipped_steps": skipped}
        if task.summary_verbosity:
            own |= {"num_predictions": num_predictions, "grad_scale": learner.grad_scale(own["grad_norm"])}
            own |= step_summaries(task.summary_verbosity, batch, grads, state.params, params, activations)
        if taken := sorted(reported.keys() & {*own, *RESERVED}):
            raise ConfigError(f"The model's metric `{taken[0]}` has the name of a metric of pax.", "Rename it.")
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, fp8=fp8, skipped_steps=skipped)
        return state, reported | own

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)


def _gradients(
    of_slice: Callable[[NestedMap], Slice], batch: NestedMap, num_microbatches: int
) -> tuple[dict, Any, dict, jax.Array, dict]:
    """Gradients, new FP8 state, metrics, number of predictions and activations of the mean loss over a batch.

    They are accumulated over `num_microbatches` slices. Slices are weighted by their loss's weight, so the result does
    not depend on their number, unless `of_slice` clips gradients, or the loss has a metric with another mean, such as
    `load_balance_loss`. FP8 scales follow from the largest values of all slices.
    """
    if num_microbatches == 1:
        new_fp8, activations, grads, metrics, _ = of_slice(batch)
        return grads, new_fp8, {name: value for name, (value, _) in metrics.items()}, metrics["loss"][1], activations

    def add(total, rows):
        largest, activations, *total = total
        new_fp8, new_activations, grads, metrics, weight = of_slice(rows)
        with jax.named_scope(GRADIENT_ACCUMULATION):
            weighted = jax.tree.map(lambda g: g.astype(jnp.float32) * weight, grads)
            sums = {name: (value * w, w) for name, (value, w) in metrics.items()}
            total = jax.tree.map(jnp.add, tuple(total), (weighted, sums, weight))
            activations = {path: sums.add(new_activations[path]) for path, sums in activations.items()}
            return (jax.tree.map(jnp.maximum, largest, new_fp8), activations, *total), None

    # Microbatch m takes rows m, m + M, …, so that no row moves to another device.
    slices = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_microbatches, *x.shape[1:]), 1, 0), batch)
    shapes = jax.eval_shape(of_slice, jax.tree.map(lambda x: x[0], slices))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    (new_fp8, activations, grads, sums, weight), _ = jax.lax.scan(add, zeros, slices)
    grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-6), grads)
    metrics = {name: value / jnp.maximum(w, 1e-6) for name, (value, w) in sums.items()}
    return grads, new_fp8, metrics, sums["loss"][1], activations


def make_eval_step(task: SingleTask) -> jax.stages.Wrapped:
    """The jitted eval step `(params, batch) -> ({metric: (sum, weight)}, examples)`; see `Metrics.combine`.

    `examples` has the `example_id` and `scores` [B] of the batch, if it has ids and the model has scores.
    """

    def eval_step(params: dict, batch: NestedMap) -> tuple[dict, dict[str, jax.Array]]:
        metrics, found = task.loss_and_metrics(task.model.cast(params), batch)
        is_scored = "example_id" in batch and "scores" in found
        examples = {"example_id": batch.example_id, "scores": found.scores} if is_scored else {}
        replicated = jax.sharding.PartitionSpec()  # so that every process can read all scores
        return task.metrics.of_batch(metrics), jax.lax.with_sharding_constraint(examples, replicated)

    return jax.jit(eval_step)
