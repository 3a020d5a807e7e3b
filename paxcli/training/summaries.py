"""Summaries of a training step beyond its metrics, at the levels of `task.summary_verbosity`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.layers.scopes import METRICS
from paxcli.layers.summaries import ActivationSums
from paxcli.mesh.sharding import path_of
from paxcli.models.losses import WeightedScalars
from paxcli.nested_map import NestedMap

NORMS, ACTIVATIONS = 2, 3  # levels; each includes those below it


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
    """Share of the rows whose weighted tokens are all correct (Pax: `acc_strict`); none of a model without tokens."""
    if "correct" not in examples:
        return {}
    weighted = examples.weights > 0
    rows = jnp.any(weighted, axis=-1)
    right, count = rows & jnp.all(examples.correct | ~weighted, axis=-1), jnp.sum(rows, dtype=jnp.float32)
    return {"accuracy_strict": (jnp.sum(right) / jnp.maximum(count, 1), count)}


@jax.named_scope(METRICS)
def step_summaries(
    verbosity: int, batch: NestedMap, grads: Any, params: Any, new_params: Any, activations: dict[str, ActivationSums]
) -> dict[str, jax.Array]:
    """The summaries of one step at this level, `task.summary_verbosity`.

    From level 1 on counts, and `applied_grad_norm`, the norm of the change of all parameters; from 2 on `grad_norm`
    (before clipping), `update_norm` and `param_norm` of each parameter; from 3 on the statistics of activations.
    """
    updates = _norms(jax.tree.map(jnp.subtract, new_params, params))
    found = count_examples(batch) | {"applied_grad_norm": optax.tree.norm(updates)}
    if "segment_ids" in batch:
        found["ratio_unpadded_tokens"] = found["num_tokens"] / batch.segment_ids.size
    if verbosity >= NORMS:
        kinds = {"grad_norm": _norms(grads), "update_norm": updates, "param_norm": _norms(new_params)}
        found |= {f"{kind}/{path}": norm for kind, norms in kinds.items() for path, norm in norms.items()}
    for path, sums in activations.items():
        for name, value in sums.statistics().items():
            layers = {f"_{i}": one for i, one in enumerate(value)} if value.ndim else {"": value}  # [L] if scanned
            found |= {f"{name}/{path}{number}": one for number, one in layers.items()}
    return found


def _norms(tree: Any) -> dict[str, jax.Array]:
    """Path → norm of each array."""
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(path_of(path)): optax.tree.norm(leaf.astype(jnp.float32)) for path, leaf in leaves}
