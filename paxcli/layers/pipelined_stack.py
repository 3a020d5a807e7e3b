"""A stack in pipeline stages (pipeline parallel): GPipe with microbatches, over the mesh axis `stage`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.config.fields import Examples, PositiveInt, SafeOnResume
from paxcli.layers.base import Cache, HiddenStates, Ids
from paxcli.layers.fp8 import FP8_STATE, of_round, recomputing_fp8
from paxcli.layers.pipeline import Pipeline, to_layers
from paxcli.layers.remat import save_as, saveable
from paxcli.layers.stack import Stack
from paxcli.mesh.axes import Axis
from paxcli.mesh.sharding import constrain, is_partitioned, path_of, without_sharding_over

_WEIGHTS = "round_weights"


class PipelinedStack(Stack):
    """Computes what `Stack` computes, in pipeline stages that are sharded over the mesh axis `stage`.

    Pax: `PipelinedTransformer`. `paxcli/layers/pipeline.py` describes the schedule and the layout of the parameters. On
    a mesh without stages every device runs all of them, with the same result. With a decode cache the layers run one
    after the other.

    Attributes:
      num_stages: S, the size of the mesh axis `stage`.
      num_microbatches: M, microbatches per batch; this or `microbatch_size`.
      microbatch_size: Rows of a microbatch, over all devices of a stage.
      circular_repeat: Groups of layers per stage (circular schedule); microbatches pass all stages as often. More
        groups make shorter bubbles.
      stream_io: Whether inputs and outputs are spread over the stages, which saves memory and broadcasts.
      gather_weights_once: Whether FSDP gathers the weights of a stage, and scatters their gradients, once per step
        instead of once per microbatch: less traffic, but memory for two unsharded copies.

    The other fields are those of `Stack`; `scan` and `unroll` apply to the layers inside a stage. `remat_policy`
    decides what is saved of a stage's work on one microbatch, as in Pax: with `nothing`, only its input.
    """

    num_stages: PositiveInt = 1
    num_microbatches: SafeOnResume[PositiveInt | None] = None
    microbatch_size: SafeOnResume[Examples | None] = None
    circular_repeat: PositiveInt = 1
    stream_io: SafeOnResume[bool] = False
    gather_weights_once: SafeOnResume[bool] = False

    matmul_flops = Stack.matmul_flops

    def setup(self) -> None:
        """Makes nothing: `__call__` makes the parameters, by stage."""

    @nn.compact
    def __call__(  # pyrefly: ignore[bad-override]
        self, x: HiddenStates, cache: Cache, segment_ids: Ids, segment_pos: Ids
    ) -> tuple[HiddenStates, Cache]:
        """Runs all layers."""
        variables = self._variables()
        if self.is_initializing():  # on one row, which does not divide into microbatches
            return x, cache
        if cache is not None:
            in_order = self._stack(self.num_layers).bind({"params": to_layers(variables["params"])})
            return in_order(x, cache, segment_ids, segment_pos)
        rounds = self.circular_repeat > 1
        state = {name: tree["repeats"]["stages"] if rounds else tree["stages"] for name, tree in variables.items()}
        params = state.pop("params")
        # FP8 state is [S, R, …].
        state = jax.tree.map(lambda s: jnp.moveaxis(s, 0, 1) if rounds else s.reshape(len(s), 1, *s.shape[1:]), state)
        x, reported = self.pipeline.run(self._stage(), params, state, x, segment_ids, segment_pos)
        for path, means in jax.tree.leaves_with_path(reported):  # [S, (K)], of all rounds: one value for each layer
            self.sow("metrics", path_of(path)[-2], jnp.tile(means / self.circular_repeat, self.circular_repeat))
        return x, None

    @property
    def pipeline(self) -> Pipeline:
        """The schedule: stages, microbatches and rounds."""
        return Pipeline(**self.named_fields(*(field.name for field in dataclasses.fields(Pipeline))))

    def _stack(self, num_layers: int) -> Stack:
        """An unbound `Stack` of such layers, without remat."""
        same = self.named_fields("block", "scan", "unroll")
        return Stack(num_layers, **self._widths, **same, remat_policy="everything", parent=None)

    def _variables(self) -> dict[str, Any]:
        """Parameters and FP8 state, if any: `{"stages": …}` each, or in rounds `{"repeats": {"stages": …}}`."""
        stack = self._stack(self.pipeline.layers_per_group(self.num_layers))
        ids = jnp.ones((1, 1), jnp.int32)

        def init(key: jax.Array) -> Any:
            return stack.init(key, jnp.zeros((1, 1, self.model_dims)), None, ids, ids)

        name, init_all = "stages", _copies(init, self.num_stages, "stage")
        if self.circular_repeat > 1:
            in_stages = init_all

            def in_rounds(key: jax.Array) -> Any:
                return {collection: {"stages": tree} for collection, tree in in_stages(key).items()}

            name, init_all = "repeats", _copies(in_rounds, self.circular_repeat, "layers")
        if self.is_initializing():
            params = self.param(name, lambda key: init_all(key)["params"])
        else:  # `self.param` would compare all shapes, but DPO's reference model has adapters that it does not use
            params = self.get_variable("params", name)
        if self.gather_weights_once:
            boxed = jax.eval_shape(init_all, jax.random.key(0))["params"]
            with without_sharding_over(Axis.FSDP):
                params = jax.tree.map(lambda box, p: constrain(p, *box.names), boxed, params, is_leaf=is_partitioned)
        variables = {"params": {name: params}}
        if self.is_initializing() and FP8_STATE in jax.eval_shape(init_all, jax.random.key(0)):
            self.variable(FP8_STATE, name, lambda: init_all(jax.random.key(0))[FP8_STATE])  # the same for every key
        if self.has_variable(FP8_STATE, name):
            variables[FP8_STATE] = {name: self.get_variable(FP8_STATE, name)}
        return variables

    def _stage(self) -> Callable[..., tuple[jax.Array, Any]]:
        """One stage on one microbatch, as `Pipeline.run` calls it."""
        stack = self._stack(self.pipeline.layers_per_group(self.num_layers))

        def stage(
            params: Any, before: Any, is_late: Any, state: Any, number: Any, in_bubble: Any, x: Any, *row_facts: Any
        ) -> tuple[jax.Array, Any]:
            if before is not None:
                params = jax.tree.map(lambda p, q: save_as(_WEIGHTS, jnp.where(is_late, q, p)), params, before)
            variables = {"params": params, **{name: of_round(tree, number, in_bubble) for name, tree in state.items()}}
            (x, _), reported = stack.apply(variables, x, None, *row_facts, mutable=["metrics"])
            return x, jax.tree.map(lambda value: jnp.where(in_bubble, 0, value), reported)

        policy = saveable(self.remat_policy, self.offload, self.save)
        if policy is None and self.circular_repeat > 1:
            policy = recomputing_fp8(jax.checkpoint_policies.save_anything_except_these_names(_WEIGHTS))
        # Inside a scan, XLA cannot merge recomputation with the forward pass (CSE), so nothing needs to prevent it.
        return stage if policy is None else jax.checkpoint(stage, policy=policy, prevent_cse=False)


def _copies(init: Callable[[jax.Array], Any], count: int, logical_axis: str) -> Callable[[jax.Array], Any]:
    """`init` with `count` keys, along a new leading dimension."""

    def init_all(key: jax.Array) -> Any:
        return nn.meta.add_axis(jax.vmap(init)(jax.random.split(key, count)), 0, {nn.PARTITION_NAME: logical_axis})

    return init_all
