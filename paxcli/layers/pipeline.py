"""GPipe as one program: every stage works on another microbatch, and hands its result to the next stage.

The stages are a dimension of each array, sharded over the mesh axis `stage`, and one iteration runs them side by side.
Between iterations the results shift by one stage, which XLA turns into a permutation between neighbours (GSPMD: Xu et
al., 2021, section 3.3; Pax: `LayerwiseShardablePipelined`). With S stages, M microbatches and R rounds there are
R * M + S - 1 iterations. The S - 1 in which a stage has nothing to do, the bubble, compute on real rows whose results
nobody reads: they cost time, and leave no trace in values or gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.errors import ConfigError
from paxcli.mesh.sharding import constrain, map_along

_ROWS = ("activation_microbatch", "activation_length", "activation_embed")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How layers are cut into stages and rows into microbatches.

    Attributes:
      num_stages: S.
      num_microbatches: M; this or `microbatch_size`.
      microbatch_size: Rows in a microbatch.
      circular_repeat: R, how often a microbatch passes all stages; a stage holds R groups of layers.
      stream_io: Whether inputs and outputs are spread over the stages and handed along, too, not held by all of them.
    """

    num_stages: int
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeat: int = 1
    stream_io: bool = False

    def layers_per_group(self, num_layers: int) -> int:
        """How many layers a microbatch meets in one stage and one round.

        Raises:
          ConfigError: The stages do not divide the layers.
        """
        groups = self.num_stages * self.circular_repeat
        if num_layers % groups:
            cut = f"num_stages={self.num_stages}"
            if self.circular_repeat > 1:
                cut += f" × circular_repeat={self.circular_repeat} = {groups}"
            raise ConfigError(
                f"num_layers={num_layers} does not divide into {cut} ({num_layers} / {groups} = "
                f"{num_layers / groups:g}).",
                f"Choose a multiple of {groups} layers, such as "
                f"`--set num_layers={max(1, round(num_layers / groups)) * groups}`, or other stages.",
            )
        return num_layers // groups

    def count_microbatches(self, rows: int) -> int:
        """M for a batch of `rows`.

        Raises:
          ConfigError: The rows do not divide into microbatches, or the microbatches do not suit the stages.
        """
        given = {"num_microbatches": self.num_microbatches, "microbatch_size": self.microbatch_size}
        given = {field: value for field, value in given.items() if value is not None}
        if len(given) != 1:
            found = "both are" if given else "none is"
            raise ConfigError(
                f"A pipelined stack takes `num_microbatches` or `microbatch_size`; {found} set.",
                "Set one of them, for example `--set stack.num_microbatches=4`.",
            )
        ((field, parts),) = given.items()
        if rows % parts:
            nearest = max((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: -abs(n - parts))
            raise ConfigError(
                f"A batch of {rows} rows does not divide by {field}={parts} ({rows} / {parts} = {rows / parts:g}).",
                f"The nearest that does: `--set stack.{field}={nearest}`.",
            )
        count = parts if field == "num_microbatches" else rows // parts
        if self.circular_repeat > 1 and count < self.num_stages:
            raise ConfigError(
                f"circular_repeat={self.circular_repeat} needs as many microbatches as stages: {rows} rows make "
                f"{count}, and num_stages={self.num_stages}.",
                "Cut the batch into more microbatches, or set `circular_repeat=1`.",
            )
        if self.stream_io and count % self.num_stages:
            raise ConfigError(
                f"stream_io spreads the microbatches over the stages: {rows} rows make {count}, which num_stages="
                f"{self.num_stages} does not divide ({count} / {self.num_stages} = {count / self.num_stages:g}).",
                "Cut the batch into another number of microbatches, or set `stream_io=false`.",
            )
        return count

    def run(
        self,
        stage: Callable[..., Float[jax.Array, "b T D"]],
        params: Any,
        x: Float[jax.Array, "B T D"],
        *row_facts: Int[jax.Array, "B T"],
    ) -> Float[jax.Array, "B T D"]:
        """All rows through all stages, as often as there are rounds.

        Args:
          stage: `(params of a stage, number of the round, whether this is a bubble, x, *row_facts) -> x` for one
            microbatch.
          params: Arrays with a leading dimension of S.
          x: Activations.
          *row_facts: What a stage must know of its rows; each travels with its microbatch.
        """
        stages, rounds, count = self.num_stages, self.circular_repeat, self.count_microbatches(x.shape[0])
        facts = [_microbatches(fact, count) for fact in row_facts]
        at = jnp.arange(stages)
        is_first, is_last = (mask.reshape(-1, 1, 1, 1) for mask in (at == 0, at == stages - 1))
        run_stages = map_along("activation_stage", stage)
        # Inputs not yet taken and outputs, in one buffer: [places, columns, …]. Iteration t takes column t % columns of
        # the first place, moves that column one place up, and puts an output into its last place.
        places = stages if self.stream_io else 1
        columns = count // places
        # A microbatch comes back to the first stage `wait` iterations before its next round begins.
        wait = count - stages if rounds > 1 else 0

        def iteration(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
            io, arriving, waiting = carry
            column = jax.lax.dynamic_index_in_dim(io, t % columns, 1, keepdims=False)
            entering = column
            if rounds > 1:
                returning = arriving
                if wait:
                    returning = jax.lax.dynamic_index_in_dim(waiting, t % wait, 1, keepdims=False)
                    waiting = jax.lax.dynamic_update_index_in_dim(waiting, arriving, t % wait, 1)
                entering = jnp.where(t < count, column, returning)
            passed = t - at  # microbatches that each stage has done, over all rounds
            theirs = [_lay(jnp.take(fact, passed % count, axis=0), "activation_stage") for fact in facts]
            here = _lay(jnp.where(is_first, entering, arriving), "activation_stage")
            in_bubble = (passed < 0) | (passed >= rounds * count)
            y = run_stages(params, jnp.clip(passed // count, 0, rounds - 1), in_bubble, here, *theirs)
            y = _lay(y, "activation_stage")
            left = jnp.where(is_last, y, jnp.roll(column, -1, axis=0)) if self.stream_io else y[-1:]
            io = self._lay_io(jax.lax.dynamic_update_index_in_dim(io, left, t % columns, 1))
            return (io, _lay(jnp.roll(y, 1, axis=0), "activation_stage"), waiting), None

        io = _microbatches(x, count)
        io = self._lay_io(io.reshape(places, columns, *io.shape[1:]))
        # The first bubbles read this: real rows, so that no layer meets values that never occur in training.
        arriving = jax.lax.stop_gradient(jnp.broadcast_to(io[:, 0], (stages, *io.shape[2:])))
        waiting = jnp.zeros((stages, wait, *io.shape[2:]), io.dtype)
        start = (io, _lay(arriving, "activation_stage"), _lay(waiting, "activation_stage", None))
        (io, _, _), _ = jax.lax.scan(iteration, start, jnp.arange(rounds * count + stages - 1))
        # Microbatch m came out S - 1 iterations after its last round began.
        y = jnp.roll(io, 1 - stages, axis=1).reshape(count, *io.shape[2:])
        return constrain(jnp.moveaxis(y, 0, 1).reshape(x.shape), "activation_batch", *_ROWS[1:])

    def _lay_io(self, io: jax.Array) -> jax.Array:
        return _lay(io, "activation_stage" if self.stream_io else None, None)


def to_stages(params: Any, num_stages: int, circular_repeat: int = 1) -> dict[str, Any]:
    """The parameters of a `Stack`, scanned or unrolled, as those of a `PipelinedStack` of the same layers.

    `layers/…` [L, …] becomes `stages/layers/…` [S, K, …], or in rounds `repeats/stages/layers/…` [R, S, K, …]: layers
    (r * S + s) * K onwards are group r of stage s. Unrolled, `layers_0/…` to `layers_{L-1}/…` become
    `stages/layers_0/…` [S, …] to `layers_{K-1}`. The names of a path say in order what its leading dimensions count.
    """
    lead = (circular_repeat, num_stages) if circular_repeat > 1 else (num_stages,)
    if "layers" in params:
        stages = {"layers": jax.tree.map(lambda p: p.reshape(*lead, -1, *p.shape[1:]), params["layers"])}
    else:
        layers = [params[f"layers_{i}"] for i in range(len(params))]
        size = len(layers) // math.prod(lead)
        stages = {
            f"layers_{k}": jax.tree.map(lambda *ps: jnp.stack(ps).reshape(*lead, *ps[0].shape), *layers[k::size])
            for k in range(size)
        }
    return {"repeats": {"stages": stages}} if circular_repeat > 1 else {"stages": stages}


def to_layers(params: Any) -> dict[str, Any]:
    """What `to_stages` began with: the parameters of a `Stack` from those of a `PipelinedStack`."""
    lead, stages = (2, params["repeats"]["stages"]) if "repeats" in params else (1, params["stages"])
    if "layers" in stages:
        return {"layers": jax.tree.map(lambda p: p.reshape(-1, *p.shape[lead + 1 :]), stages["layers"])}
    groups = [jax.tree.map(lambda p: p.reshape(-1, *p.shape[lead:]), stages[f"layers_{k}"]) for k in range(len(stages))]
    num_layers = len(groups) * jax.tree.leaves(groups)[0].shape[0]
    return {
        f"layers_{i}": jax.tree.map(lambda p, i=i: p[i // len(groups)], groups[i % len(groups)])
        for i in range(num_layers)
    }


def _microbatches(rows: jax.Array, count: int) -> jax.Array:
    """[B, …] to [M, b, …]. Microbatch m takes rows m, m + M, …: every device keeps the rows that it has.

    The stages, the last mesh axis that the batch lies on, share the microbatches then, as `stream_io` wants them.
    """
    return jnp.moveaxis(rows.reshape(-1, count, *rows.shape[1:]), 1, 0)


def _lay(x: jax.Array, *leading: str | None) -> jax.Array:
    """`x` whose leading dimensions are these, and whose others are rows, positions and perhaps features."""
    return constrain(x, *leading, *_ROWS[: x.ndim - len(leading)])
