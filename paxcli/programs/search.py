"""Searches for the mesh, remat policy and batch size with which a target is predicted to train a recipe fastest.

The three are searched one after the other, each with the best of those before: the mesh inside a slice, the remat
policy, the rows on each device. They hardly depend on each other, and all combinations would take days.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, get_args

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.errors import ConfigError
from paxcli.layers.remat import RematPolicy
from paxcli.mesh.axes import Axis
from paxcli.mesh.mesh import axis_sizes
from paxcli.programs.ahead_of_time import compile_ahead
from paxcli.programs.chips import CHIPS
from paxcli.programs.topologies import CompileTarget
from paxcli.training.experiment import Experiment, global_batch_size

_BATCH, _MESH = "task.train.percore_batch_size", "mesh.ici_mesh_shape"

Changes = dict[str, Any]  # path → value, as `--set` takes them


@dataclasses.dataclass(frozen=True)
class Trial:
    """One compiled variant of a recipe.

    Attributes:
      settings: What differs from the recipe.
      report: What `compile_ahead` reports.
    """

    settings: Changes
    report: dict[str, Any]

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher is better: variants that fit by tokens per second, then the others by the memory they need."""
        if self.report["fits"]:
            return True, self.report["predicted_tokens_per_second"] or 0.0
        return False, -float(self.report["hbm_needed_bytes"] or "inf")


def search(
    config: fdl.Config[Experiment], target: CompileTarget, on_trial: Callable[[Trial], None] = lambda trial: None
) -> list[Trial]:
    """Compiles variants of a recipe, the recipe itself first, and ranks them from best to worst.

    Args:
      config: The recipe.
      target: What to compile for.
      on_trial: Called after each variant.

    Raises:
      ConfigError: The recipe cannot be sharded over the target's devices, or their step time cannot be predicted.
    """
    if target.generation not in CHIPS:
        hint = "Choose a TPU: `--topology v4-8`."
        raise ConfigError(f"There is no step-time prediction for {target.name} to rank by.", hint)
    trials: list[Trial] = []

    def attempt(settings: Changes) -> Trial | None:
        """Compiles a variant; None if it cannot be sharded over the target's devices."""
        try:
            trial = Trial(settings, compile_ahead(_with(config, settings), target).report)
        except ConfigError:
            if settings:
                return None
            raise
        trials.append(trial)
        on_trial(trial)
        return trial

    attempt({})
    for variants in (_meshes, _policies, _batches):
        best = max(trials, key=lambda trial: trial.rank)
        for settings in variants(config, target, best.settings):
            attempt(settings)
    best = max(trials, key=lambda trial: trial.rank)
    while not best.report["fits"] and (fewer := _with_rows(config, target, best.settings, 0.5)) is not None:
        if (trial := attempt(fewer)) is None:
            break
        best = trial
    return sorted(trials, key=lambda trial: trial.rank, reverse=True)


def _with(config: fdl.Config[Experiment], settings: Changes) -> fdl.Config[Experiment]:
    changed = copy.deepcopy(config)
    for path, value in settings.items():
        assign(changed, path, value)
    if _BATCH in settings:
        changed.task.train.global_batch_size = None
    return changed


def _meshes(config: fdl.Config[Experiment], target: CompileTarget, best: Changes) -> Iterator[Changes]:
    """Other splits of the devices over `fsdp` and `tensor`; the other axes keep their sizes."""
    sizes = axis_sizes(config.mesh.ici_mesh_shape, None)
    both = sizes[Axis.FSDP] * sizes[Axis.TENSOR]
    current = sizes[Axis.TENSOR]
    if config.mesh.ici_mesh_shape is None and target.devices_per_slice > 1:  # all devices are on the data axis
        both, current = target.devices_per_slice, None
    for size in (1, 2, 4, 8):
        if both % size == 0 and size != current:
            shape = sizes | {Axis.FSDP.value: both // size, Axis.TENSOR.value: size}
            yield best | {_MESH: {axis: size for axis, size in shape.items() if size > 1}}


def _policies(config: fdl.Config[Experiment], target: CompileTarget, best: Changes) -> Iterator[Changes]:
    stacks = fdl.build(config.task.model).stacks()
    now = {f"task.model.{path}.remat_policy": stack.remat_policy for path, stack in stacks.items()}
    for policy in get_args(RematPolicy) if now else ():
        if set(now.values()) != {policy}:
            yield best | dict.fromkeys(now, policy)


def _batches(config: fdl.Config[Experiment], target: CompileTarget, best: Changes) -> Iterator[Changes]:
    yield from filter(None, (_with_rows(config, target, best, factor) for factor in (0.5, 2.0)))


def _with_rows(config: fdl.Config[Experiment], target: CompileTarget, best: Changes, factor: float) -> Changes | None:
    """The settings with `factor` times their rows on each device; None for less than one row in total."""
    devices = target.devices_per_slice * target.num_slices
    rows = factor * global_batch_size(_with(config, best), devices) / devices
    return best | {_BATCH: int(rows) if rows == int(rows) else rows} if rows * devices >= 1 else None
