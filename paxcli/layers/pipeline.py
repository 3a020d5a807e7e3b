"""Pipeline parallelism (GPipe, Huang et al., 2019) as one program, with a circular schedule as an option.

The stages are a dimension of each array, sharded over the mesh axis `stage`; one iteration runs all stages, each on its
own microbatch. Between iterations the results shift by one stage, which XLA compiles to a collective permute (GSPMD: Xu
et al., 2021, section 3.3; Pax: `LayerwiseShardablePipelined`). With S stages, M microbatches and R rounds there are
R * M + S - 1 iterations. In the S - 1 iterations of its bubble, a stage computes on real rows and its results are
discarded: they cost time, but change neither values nor gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.tree import check_one_is_set
from paxcli.errors import ConfigError
from paxcli.layers.stack import entry_at
from paxcli.mesh.sharding import constrain, vmap_along

_ROWS = ("activation_microbatch", "activation_length", "activation_embed")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How layers are divided into stages, and rows into microbatches.

    Attributes:
      num_stages: S.
      num_microbatches: M; this or `microbatch_size`.
      microbatch_size: Rows of a microbatch.
      circular_repeat: R, rounds: how often a microbatch passes all stages; a stage holds R groups of layers.
      stream_io: Whether inputs and outputs are sharded over the stages and shifted along, instead of replicated.
    """

    num_stages: int
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeat: int = 1
    stream_io: bool = False

    def layers_per_group(self, num_layers: int) -> int:
        """Layers per stage and round.

        Raises:
          ConfigError: The stages do not divide the layers.
        """
        groups = self.num_stages * self.circular_repeat
        if num_layers % groups:
            parts = f"num_stages={self.num_stages}"
            if self.circular_repeat > 1:
                parts += f" × circular_repeat={self.circular_repeat} = {groups}"
            near = max(1, round(num_layers / groups)) * groups
            hint = f"Choose a multiple of {groups} layers, such as `--set num_layers={near}`, or another `num_stages`."
            cause = f"does not divide into {parts} ({_quotient(num_layers, groups)})"
            raise ConfigError(f"num_layers={num_layers} {cause}.", hint)
        return num_layers // groups

    def count_microbatches(self, rows: int) -> int:
        """M for a batch of `rows`.

        Raises:
          ConfigError: The rows do not divide into microbatches, or their number does not fit the schedule.
        """
        check_one_is_set(self, "num_microbatches", "microbatch_size", "stack.num_microbatches=4")
        field = "num_microbatches" if self.microbatch_size is None else "microbatch_size"
        parts = getattr(self, field)
        if rows % parts:
            nearest = max((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: -abs(n - parts))
            hint = f"The nearest that divides: `--set stack.{field}={nearest}`."
            cause = f"does not divide by {field}={parts} ({_quotient(rows, parts)})"
            raise ConfigError(f"A batch of {rows} rows {cause}.", hint)
        count = parts if field == "num_microbatches" else rows // parts
        stages, made = self.num_stages, f"{rows} rows make {count}"
        if self.circular_repeat > 1 and count < stages:
            hint = "Use more microbatches, or set `circular_repeat=1`."
            need = f"circular_repeat={self.circular_repeat} needs as many microbatches as stages"
            raise ConfigError(f"{need}: {made}, and num_stages={stages}.", hint)
        if self.stream_io and count % stages:
            hint = "Use another number of microbatches, or set `stream_io=false`."
            cause = f"{made}, which num_stages={stages} does not divide ({_quotient(count, stages)})"
            raise ConfigError(f"stream_io spreads the microbatches over the stages: {cause}.", hint)
        return count

    def work_with_bubble(self, rows: int) -> float:
        """Work on a batch of `rows`, over that without the bubble's iterations: 1 + (S - 1) / (R * M)."""
        return 1 + (self.num_stages - 1) / (self.circular_repeat * self.count_microbatches(rows))

    def run(
        self,
        stage: Callable[..., tuple[Float[jax.Array, "b T D"], Any]],
        params: Any,
        state: Any,
        x: Float[jax.Array, "B T D"],
        *row_facts: Int[jax.Array, "B T"],
    ) -> tuple[Float[jax.Array, "B T D"], Any]:
        """Runs all rows through all stages, in all rounds.

        Args:
          stage: `(params, params of the round before or None, whether to use those, state, number of the round, whether
            this is a bubble, x, *row_facts) -> (x, metrics)` for one microbatch; in a bubble, metrics are 0.
          params: Arrays [S, …], or with more than one round [R, S, …].
          state: Arrays [S, …], which the stage gets in every round.
          x: Activations.
          *row_facts: Arrays by row that the stages read, such as segment ids; they move with their microbatch.

        Returns:
          Activations, and metrics [S, …]: their means over microbatches, summed over rounds.
        """
        stages, rounds, count = self.num_stages, self.circular_repeat, self.count_microbatches(x.shape[0])
        bubble = stages - 1
        facts = [_microbatches(fact, count) for fact in row_facts]
        at = jnp.arange(stages)
        is_first, is_last = (mask.reshape(-1, 1, 1, 1) for mask in (at == 0, at == stages - 1))
        run_stages = vmap_along("activation_stage", stage)
        # One buffer [slots, columns, …] holds pending inputs and finished outputs. Iteration t reads column t % columns
        # of the first slot, shifts that column by one slot, and writes an output into its last slot.
        slots = stages if self.stream_io else 1
        columns = count // slots
        # A microbatch begins its next round in the last of so many iterations after it returned to the first stage.
        wait = count - bubble

        def iterate(carry: tuple, first: Any, length: int, now: Any, before: Any, began: Any) -> tuple[tuple, Any]:
            """Iterations from `first` on, in the round that began at `began`; a stage that is late is in `before`."""

            def iteration(carry: tuple, t: jax.Array) -> tuple[tuple, Any]:
                io, arriving, waiting = carry
                column = jax.lax.dynamic_index_in_dim(io, t % columns, 1, keepdims=False)
                entering = column
                if rounds > 1:
                    waiting = jax.lax.dynamic_update_index_in_dim(waiting, arriving, t % wait, 1)
                    returning = jax.lax.dynamic_index_in_dim(waiting, (t + 1) % wait, 1, keepdims=False)
                    entering = jnp.where(t < count, column, returning)
                passed = t - at  # microbatches that each stage has completed, over all rounds
                theirs = [_constrain(jnp.take(fact, passed % count, axis=0), "activation_stage") for fact in facts]
                here = _constrain(jnp.where(is_first, entering, arriving), "activation_stage")
                in_bubble = (passed < 0) | (passed >= rounds * count)
                number = jnp.clip(passed // count, 0, rounds - 1)
                y, metrics = run_stages(now, before, passed < began, state, number, in_bubble, here, *theirs)
                y = _constrain(y, "activation_stage")
                left = jnp.where(is_last, y, jnp.roll(column, -1, axis=0)) if self.stream_io else y[-1:]
                io = self._constrain_io(jax.lax.dynamic_update_index_in_dim(io, left, t % columns, 1))
                return (io, _constrain(jnp.roll(y, 1, axis=0), "activation_stage"), waiting), metrics

            carry, metrics = jax.lax.scan(iteration, carry, first + jnp.arange(length))
            return carry, jax.tree.map(lambda values: jnp.sum(values, axis=0) / count, metrics)

        def weights_of(number: Any) -> Any:
            return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, number, keepdims=False), params)

        # All stages use the weights of one round, but for the iterations in which they begin it one after the other. So
        # weight gradients are summed over devices once a round; with weights by iteration, XLA sums them in each.
        def one_round(carry: tuple, number: jax.Array) -> tuple[tuple, Any]:
            now, before, began = weights_of(number), weights_of(jnp.maximum(number - 1, 0)), number * count
            carry, early = iterate(carry, began, bubble, now, before, began)
            carry, late = iterate(carry, began + bubble, count - bubble, now, None, began)
            return carry, jax.tree.map(jnp.add, early, late)

        io = self._constrain_io(_microbatches(x, count).reshape(slots, columns, -1, *x.shape[1:]))
        # The first bubbles compute on this: real rows, since layers may produce NaNs on arbitrary values.
        arriving = jax.lax.stop_gradient(jnp.broadcast_to(io[:, 0], (stages, *io.shape[2:])))
        waiting = jnp.zeros((stages, wait if rounds > 1 else 0, *io.shape[2:]), io.dtype)
        carry = (io, _constrain(arriving, "activation_stage"), _constrain(waiting, "activation_stage", None))
        if rounds == 1:
            carry, metrics = iterate(carry, 0, count + bubble, params, None, 0)
        else:
            carry, by_round = jax.lax.scan(one_round, carry, jnp.arange(rounds))
            carry, last = iterate(carry, rounds * count, bubble, weights_of(rounds - 1), None, 0)
            metrics = jax.tree.map(lambda values, more: jnp.sum(values, axis=0) + more, by_round, last)
        # Microbatch m leaves S - 1 iterations after its last round begins. Without the constraint, XLA would shard the
        # buffer over the stages, as the batch is, and gather it in every iteration.
        y = jnp.roll(self._constrain_io(carry[0]), -bubble, axis=1).reshape(count, *carry[0].shape[2:])
        return constrain(jnp.moveaxis(y, 0, 1).reshape(x.shape), "activation_batch", *_ROWS[1:]), metrics

    def _constrain_io(self, io: jax.Array) -> jax.Array:
        return _constrain(io, "activation_stage" if self.stream_io else None, None)


def to_layers(params: Any) -> dict[str, Any]:
    """The parameters of a `PipelinedStack` as those of a `Stack` of the same layers, scanned or unrolled.

    `stages/layers/…` [S, K, …], or in rounds `repeats/stages/layers/…` [R, S, K, …], becomes `layers/…` [L, …]: group r
    of stage s has layers (r * S + s) * K onwards. Unrolled, `stages/layers_0/…` [S, …] to `layers_{K-1}` become
    `layers_0/…` to `layers_{L-1}/…`. A path names its leading dimensions in order.
    """
    lead, stages = (2, params["repeats"]["stages"]) if "repeats" in params else (1, params["stages"])
    if "layers" in stages:
        return {"layers": jax.tree.map(lambda p: p.reshape(-1, *p.shape[lead + 1 :]), stages["layers"])}
    groups = [jax.tree.map(lambda p: p.reshape(-1, *p.shape[lead:]), stages[f"layers_{k}"]) for k in range(len(stages))]
    num_layers = len(groups) * jax.tree.leaves(groups)[0].shape[0]
    return {f"layers_{i}": entry_at(groups[i % len(groups)], i // len(groups)) for i in range(num_layers)}


def _quotient(size: int, parts: int) -> str:
    """A division as errors show it: `7 / 2 = 3.5`."""
    return f"{size} / {parts} = {size / parts:g}"


def _microbatches(rows: jax.Array, count: int) -> jax.Array:
    """[B, …] to [M, b, …]. Microbatch m has rows m, m + M, …, so that every device keeps its rows.

    The batch is sharded over `stage` last, so that the stages share the microbatches, as `stream_io` needs.
    """
    return jnp.moveaxis(rows.reshape(-1, count, *rows.shape[1:]), 1, 0)


def _constrain(x: jax.Array, *leading: str | None) -> jax.Array:
    """`x` with a sharding constraint: these leading axes, then those of rows, positions and perhaps features."""
    return constrain(x, *leading, *_ROWS[: x.ndim - len(leading)])
