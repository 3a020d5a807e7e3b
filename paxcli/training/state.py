"""What a run carries from step to step, and saves."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxcli.layers.fp8 import FP8_STATE
from paxcli.mesh.rules import Rules
from paxcli.mesh.sharding import like_params, param_shardings
from paxcli.mesh.weights import Weight, weights_of
from paxcli.nested_map import NestedMap
from paxcli.training.task import SingleTask


class TrainState(flax.struct.PyTreeNode):
    """Everything that training changes.

    Attributes:
      step: Updates made, int32.
      params: Parameters, float32.
      opt_state: The optimizer's state.
      fp8: Scales of the products in FP8, and the largest values of the steps before; empty without such products.
      key: Root of the run's randomness, uint32 [2]; each step folds its number in.
      skipped_steps: Updates refused because a gradient was not finite, int32.
      weights: The `Weight` of each parameter, in the order of the leaves of `params`. Static: it is not saved.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    fp8: Any
    key: jax.Array
    skipped_steps: jax.Array
    weights: tuple[Weight, ...] = flax.struct.field(pytree_node=False)


def _create(task: SingleTask, batch: NestedMap, seed: jax.Array) -> TrainState:
    """A new state whose parameters still carry their logical axes."""
    root = jax.random.key(seed)
    variables = task.model.init({"params": jax.random.fold_in(root, 0)}, batch)
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
    """Zeros with `rows` rows in the shape of a batch: enough to learn a model's shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), spec)


def abstract_params(task: SingleTask, spec: NestedMap) -> dict:
    """Shapes and logical axes of the parameters, without touching a device."""
    return jax.eval_shape(lambda: task.model.init({"params": jax.random.key(0)}, example_batch(spec, 1))["params"])


def abstract_state(task: SingleTask, spec: NestedMap, mesh: Mesh, rules: Rules) -> TrainState:
    """Shapes and shardings of the state, without computing any of it.

    Args:
      task: The task.
      spec: Shapes of a batch.
      mesh: The device mesh.
      rules: Logical axis → mesh axes.
    """
    boxed = jax.eval_shape(lambda: _create(task, example_batch(spec, 1), jnp.uint32(0)))
    state = nn.meta.unbox(boxed)
    shardings = like_params(state, state.params, param_shardings(mesh, rules, boxed.params), mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, shardings
    )


def create_state(task: SingleTask, spec: NestedMap, abstract: TrainState) -> TrainState:
    """A new state, each array made on the devices that will hold it."""

    def create(seed: jax.Array) -> TrainState:
        return nn.meta.unbox(_create(task, example_batch(spec, 1), seed))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    on_cpu = all(device.platform == "cpu" for device in abstract.step.sharding.device_set)
    # It runs once, so on a CPU it is worth little of the compiler's time.
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(create, out_shardings=shardings, compiler_options=options)(jnp.uint32(task.train.random_seed))


def bytes_per_device(tree: Any) -> int:
    """What one device holds of arrays, or of their shapes, that are laid out over a mesh."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def count_parameters(params: dict) -> int:
    """Number of trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(nn.meta.unbox(params)))
