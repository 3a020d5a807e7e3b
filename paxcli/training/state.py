"""The training state: what each step updates and checkpoints hold."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import flax.errors
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxcli.config.consent import RECIPE_FILE
from paxcli.errors import ConfigError, first_line
from paxcli.layers.fp8 import FP8_STATE
from paxcli.layers.lora import REFERENCE
from paxcli.mesh.rules import Rules
from paxcli.mesh.sharding import param_shardings, shardings_like_params
from paxcli.mesh.weights import Weight, weights_of
from paxcli.nested_map import NestedMap
from paxcli.training.task import SingleTask


class TrainState(flax.struct.PyTreeNode):
    """Everything that a training step updates.

    Attributes:
      step: Updates made, int32.
      params: Parameters, float32.
      opt_state: The optimizer's state.
      fp8: Scales of FP8 matmuls and their history of largest values; empty without FP8.
      key: Random key of the run, uint32 [2]; each step folds its number into it.
      skipped_steps: Number of skipped updates, int32.
      weights: The `Weight` of each parameter, in the order of the leaves of `params`. Static: it is not saved.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    fp8: Any
    key: jax.Array
    skipped_steps: jax.Array
    weights: tuple[Weight, ...] = flax.struct.field(pytree_node=False)


def _trace(function: Callable[..., Any], *arguments: Any) -> Any:
    """`jax.eval_shape` of a function that initializes a model.

    Raises:
      ConfigError: The parts that the recipe puts together do not fit each other.
    """
    try:
        return jax.eval_shape(function, *arguments)
    except (TypeError, ValueError, AttributeError, ArithmeticError, flax.errors.FlaxError) as error:
        if any(name.startswith(RECIPE_FILE) for name in sys.modules):  # perhaps a mistake in the user's own part
            raise
        message = f"The model cannot be built: {type(error).__name__}: {first_line(error)}"
        raise ConfigError(message, "Choose layers and sizes that fit each other.") from error


def _create(task: SingleTask, spec: NestedMap, seed: jax.Array) -> TrainState:
    """A new state whose parameters still have their boxes."""
    root = jax.random.key(seed)
    variables = task.model.init({"params": jax.random.fold_in(root, 0)}, example_batch(spec, 1))
    params = variables["params"]
    weights = weights_of(params)
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=task.train.learner.init(nn.meta.unbox(params), weights),
        fp8=variables.get(FP8_STATE, {}),
        key=jax.random.key_data(jax.random.fold_in(root, 1)),
        skipped_steps=jnp.zeros([], jnp.int32),
        weights=tuple(jax.tree.leaves(weights)),
    )


def example_batch(spec: NestedMap, rows: int) -> NestedMap:
    """A batch of zeros with `rows` rows, to trace a model with."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), spec)


def abstract_params(task: SingleTask, spec: NestedMap) -> dict:
    """Shapes of the parameters, in boxes with their facts (`mesh/weights.py`). Starts no device."""
    return _trace(lambda: task.model.init({"params": jax.random.key(0)}, example_batch(spec, 1))["params"])


def abstract_state(task: SingleTask, spec: NestedMap, mesh: Mesh, rules: Rules) -> tuple[TrainState, Callable]:
    """Shapes and shardings of the state, and the function of a seed that creates it. Computes nothing.

    Args:
      task: The task.
      spec: Shapes of a batch.
      mesh: The device mesh.
      rules: Logical axis → mesh axes.
    """
    init_fn = functools.partial(_create, task, spec)
    boxed = _trace(init_fn, np.uint32(0))
    state = nn.meta.unbox(boxed)
    shardings = shardings_like_params(state, state.params, param_shardings(mesh, rules, boxed.params), mesh)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), state, shardings), init_fn


def bytes_per_device(tree: Any) -> int:
    """Bytes on one device of sharded arrays, or of their shapes."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def without_reference(params: dict) -> dict:
    """The parameters of the model, without DPO's frozen copy of them."""
    return {name: tree for name, tree in params.items() if name != REFERENCE}


def count_parameters(params: dict) -> int:
    """Number of parameters of the model."""
    return sum(leaf.size for leaf in jax.tree.leaves(nn.meta.unbox(without_reference(params))))
