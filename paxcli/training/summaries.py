"""Summaries of a training step beyond its metrics, at the levels of `task.summary_verbosity`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.layers.scopes import METRICS
from paxcli.layers.summaries import ActivationSums
from paxcli.mesh.sharding import path_of
from paxcli.models.losses import WeightedScalars
from paxcli.nested_map import NestedMap

COUNTS, NORMS, ACTIVATIONS = 1, 2, 3  # each level includes those below it


def count_examples(batch: NestedMap) -> dict[str, jax.Array]:
    """`num_examples` of a batch, and of one with tokens `num_tokens`; padding does not count.

    The examples of a batch with `segment_ids` [B, T] are its packed sequences, those of others its weighted rows.
    """
    if "segment_ids" in batch:
        ids = batch.segment_ids
        starts = (ids != 0) & (ids != jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1])
        return {"num_examples": jnp.sum(starts), "num_tokens": jnp.sum(ids != 0)}
    return {"num_examples": jnp.sum(batch.weights > 0)} if "weights" in batch else {}


def strict_accuracy(examples: NestedMap) -> WeightedScalars:
    """Share of the rows whose weighted tokens are all correct (Pax: `acc_strict`); none without such a row."""
    if "correct" not in examples:
        return {}
    weighted = examples.weights > 0
    rows = jnp.any(weighted, axis=-1)
    right = rows & jnp.all(examples.correct | ~weighted, axis=-1)
    count = jnp.sum(rows, dtype=jnp.float32)
    return {"accuracy_strict": (jnp.sum(right) / jnp.maximum(count, 1), count)}


@jax.named_scope(METRICS)
def step_summaries(
    verbosity: int,
    batch: NestedMap,
    num_predictions: jax.Array,
    grad_scale: jax.Array,
    grads: Any,
    params: Any,
    new_params: Any,
    activations: Mapping[str, ActivationSums],
) -> dict[str, jax.Array]:
    """The summaries of one step at this level.

    Args:
      verbosity: `task.summary_verbosity`.
      batch: The batch of the step.
      num_predictions: Sum of the weights of its tokens or rows.
      grad_scale: Factor by which the global norm clips gradients.
      grads: Gradients before clipping.
      params: Parameters before the update.
      new_params: Parameters after it.
      activations: What `activations_by_layer` returns.

    Returns:
      From level 1 on counts, `grad_scale`, and `applied_grad_norm`, the norm of the change of all parameters; from 2 on
      `grad_norm`, `update_norm` and `param_norm` of each parameter; from 3 on statistics of activations, [L] for
      scanned layers.
    """
    updates = _norms(jax.tree.map(jnp.subtract, new_params, params))
    found = count_examples(batch) | {
        "num_predictions": num_predictions,
        "grad_scale": grad_scale,
        "applied_grad_norm": jnp.linalg.norm(jnp.stack(list(updates.values()))),
    }
    if "segment_ids" in batch:
        found["ratio_unpadded_tokens"] = found["num_tokens"] / batch.segment_ids.size
    if verbosity >= NORMS:
        kinds = {"grad_norm": _norms(grads), "update_norm": updates, "param_norm": _norms(new_params)}
        found |= {f"{kind}/{path}": norm for kind, norms in kinds.items() for path, norm in norms.items()}
    for path, sums in activations.items():
        found |= {f"{name}/{path}": value for name, value in sums.statistics().items()}
    return found


def _norms(tree: Any) -> dict[str, jax.Array]:
    """Path → norm of each array."""
    return {
        "/".join(path_of(path)): jnp.sqrt(jnp.sum(jnp.square(leaf.astype(jnp.float32))))
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
