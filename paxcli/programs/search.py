"""The settings of a recipe that a target is predicted to run fastest: mesh, batch, what is kept for the backward pass.

One setting after the other, each with the best of those before: the mesh inside a slice, then the remat policy, then
the rows of a device. Trying all combinations would take days, and the three hardly depend on each other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import fiddle as fdl

from paxcli.errors import ConfigError
from paxcli.layers.remat import RematPolicy
from paxcli.mesh.axes import Axis
from paxcli.mesh.mesh import axis_sizes
from paxcli.programs.ahead_of_time import compile_ahead
from paxcli.programs.prediction import is_predictable
from paxcli.programs.topologies import Target
from paxcli.training.experiment import Experiment, global_batch_size

_BATCH, _MESH = "task.train.percore_batch_size", "mesh.ici_mesh_shape"
_TENSOR_WAYS = (1, 2, 4, 8)
_BATCHES = (0.5, 2.0)

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tried:
    """One compilation.

    Attributes:
      settings: Path → value, as `--set` takes them.
      report: Of the compilation.
    """

    settings: Settings
    report: dict[str, Any]

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher is better: those that fit by tokens per second, then the others by what they need."""
        if self.report["fits"]:
            return True, self.report["predicted_tokens_per_second"] or 0.0
        return False, -float(self.report["hbm_needed_bytes"] or "inf")


def search(
    config: fdl.Config[Experiment], target: Target, heard: Callable[[Tried], None] = lambda tried: None
) -> list[Tried]:
    """Compiles variants of a recipe, the recipe itself first, and returns them from the best to the worst.

    Args:
      config: The recipe.
      target: What to compile for.
      heard: Called after each.

    Raises:
      ConfigError: The recipe itself does not fit the target's devices, memory aside, or nothing is predicted for them.
    """
    if not is_predictable(target.generation):
        raise ConfigError(f"There is no prediction to rank by for {target.name}.", "Name a TPU: `--topology v4-8`.")
    best = Tried({}, compile_ahead(config, target).report)
    tried = [best]
    heard(best)
    for variants in (_meshes, _policies, _batches):
        for settings in variants(config, target, best.settings):
            one = _try(config, target, settings)
            if one is not None:
                tried.append(one)
                heard(one)
        best = max(tried, key=lambda one: one.rank)
    while not best.report["fits"] and (fewer := _with_rows(config, target, best.settings, 0.5)) is not None:
        one = _try(config, target, fewer)
        if one is None:
            break
        tried.append(one)
        heard(one)
        best = one
    return sorted(tried, key=lambda one: one.rank, reverse=True)


def _try(config: fdl.Config[Experiment], target: Target, settings: Settings) -> Tried | None:
    """Compiles a variant; None where its sizes do not divide over the mesh."""
    try:
        return Tried(settings, compile_ahead(_with(config, settings), target).report)
    except ConfigError:
        return None


def _with(config: fdl.Config[Experiment], settings: Settings) -> fdl.Config[Experiment]:
    changed = copy.deepcopy(config)
    for path, value in settings.items():
        *parents, field = path.split(".")
        owner: Any = changed
        for name in parents:
            owner = getattr(owner, name)
        setattr(owner, field, value)
    if _BATCH in settings:
        changed.task.train.global_batch_size = None
    return changed


def _meshes(config: fdl.Config[Experiment], target: Target, best: Settings) -> Iterator[Settings]:
    """`fsdp` and `tensor` shared out in other ways; the other axes stay."""
    sizes = axis_sizes(config.mesh.ici_mesh_shape, None)
    both = sizes[Axis.FSDP] * sizes[Axis.TENSOR]
    now = sizes[Axis.TENSOR]
    if config.mesh.ici_mesh_shape is None and target.devices_per_slice > 1:  # all devices are replicas
        both, now = target.devices_per_slice, None
    for ways in _TENSOR_WAYS:
        if both % ways == 0 and ways != now:
            shape = sizes | {Axis.FSDP.value: both // ways, Axis.TENSOR.value: ways}
            yield best | {_MESH: {axis: size for axis, size in shape.items() if size > 1}}


def _policies(config: fdl.Config[Experiment], target: Target, best: Settings) -> Iterator[Settings]:
    stacks = fdl.build(config.task.model).stacks()
    now = {f"task.model.{path}.remat_policy": stack.remat_policy for path, stack in stacks.items()}
    for policy in get_args(RematPolicy) if now else ():
        if set(now.values()) != {policy}:
            yield best | dict.fromkeys(now, policy)


def _batches(config: fdl.Config[Experiment], target: Target, best: Settings) -> Iterator[Settings]:
    for factor in _BATCHES:
        rows = _with_rows(config, target, best, factor)
        if rows is not None:
            yield rows


def _with_rows(config: fdl.Config[Experiment], target: Target, best: Settings, factor: float) -> Settings | None:
    """The settings with so many times their rows on each device; None for less than one row in all."""
    devices = target.devices_per_slice * target.num_slices
    rows = factor * global_batch_size(_with(config, best), devices) / devices
    return best | {_BATCH: int(rows) if rows == int(rows) else rows} if rows * devices >= 1 else None
