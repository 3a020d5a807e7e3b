"""Searches for the mesh, remat policy and batch size with which a target is predicted to train a recipe fastest.

All combinations are estimated without compiling. The recipe itself is compiled, then what is estimated to be fastest of
what fits, a few times; each compiled program corrects the estimated memory of the next.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.errors import ConfigError
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.remat import RematPolicy
from paxcli.mesh.axes import BATCH_AXES, Axis
from paxcli.mesh.mesh import axis_sizes
from paxcli.programs.ahead_of_time import compile_ahead, open_on_target
from paxcli.programs.estimate import MeshCosts, Work, count_work, find_rates, measure_mesh
from paxcli.programs.topologies import CompileTarget
from paxcli.training.experiment import Experiment, global_batch_size, with_derived_sizes
from paxcli.training.session import Session

_BATCH, _MESH = "task.train.percore_batch_size", "mesh.ici_mesh_shape"
_QKV = ("query", "key", "value")
# Policies with what they save besides: on the device, and on the host.
_MORE_SAVED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("qkv_context_out_proj", ("feed_forward_in",), ()),  # one of the two matmuls of a gated feed-forward layer
    ("nothing", (), ("layer_input",)),
    ("nothing", (), ("layer_input", "query", "out_proj")),
    ("context", (), _QKV),
    ("context", (), ("layer_input", *_QKV)),
)
# libtpu copies offloaded activations one layer late by default, and then waits for them. Pipelines do without the
# option: with it, libtpu reduces the gradients of weights after each microbatch instead of once a step.
_TRANSFERS_AT_ONCE = {"xla_tpu_pipeline_memory_host_transfers": "false"}
_MOST_COMPILED = 6  # variants, the recipe itself included
_SECONDS = 360  # after which no further variant is compiled, once one is better
_STAGES = (1, 2, 3, 4, 6, 8)  # of a pipeline, times the recipe's; each microbatch then has one row for each device
_TENSOR = (1, 2, 4, 8)
_ROWS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the recipe's
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
        """Higher is better: variants that fit by rows per second, then the others by the memory they need."""
        if self.report["fits"]:
            return True, self.report["global_batch_size"] / self.report["predicted_step_seconds"]
        return False, -float(self.report["hbm_needed_bytes"] or "inf")


class _Candidate(NamedTuple):
    """A variant that could be compiled: its settings, mesh, and work."""

    settings: Changes
    mesh: MeshCosts
    work: Work

    @property
    def memory(self) -> float:
        """Estimated bytes of a device."""
        return self.mesh.memory(self.work)

    @property
    def speed(self) -> float:
        """Estimated tokens per second; rows of a model that has no tokens."""
        return self.work.tokens / self.mesh.seconds(self.work)


def search(
    config: fdl.Config[Experiment],
    target: CompileTarget,
    on_trial: Callable[[Trial, Trial], None] = lambda trial, best: None,
) -> list[Trial]:
    """Compiles a recipe and its most promising variants, and ranks them from best to worst.

    Args:
      config: The recipe.
      target: What to compile for.
      on_trial: Called after each variant, with it and the best so far.

    Raises:
      ConfigError: The recipe cannot be sharded over the target's devices, or their step time cannot be predicted.
    """
    began, trials = time.monotonic(), []
    in_hbm, on_host = target.hbm_bytes or float("inf"), target.host_bytes or float("inf")
    with _quiet():
        candidates = _candidates(config, target)
    candidates = [one for one in candidates if not one.settings or one.mesh.on_host(one.work) <= on_host]
    next_one, slack = next(one for one in candidates if not one.settings), 0.0
    while len(trials) < _MOST_COMPILED:
        candidates.remove(next_one)
        try:
            report = compile_ahead(_with(config, next_one.settings), target).report
        except ConfigError:
            if not next_one.settings:
                raise
        else:
            trial = Trial(next_one.settings, report)
            trials = sorted([*trials, trial], key=lambda one: one.rank, reverse=True)
            on_trial(trial, trials[0])
            # What a program needs that offloads, and that libtpu accepts, is known as an upper bound only. One that
            # needs all there is may have been compiled to need less.
            needed = report["hbm_needed_bytes"]
            if needed and not (next_one.work.offloaded and needed < in_hbm):
                slack = needed - next_one.memory
        is_found = trials[0].report["fits"] and bool(trials[0].settings)
        if not candidates or (is_found and time.monotonic() - began > _SECONDS):
            break
        fitting = [one for one in candidates if one.memory <= in_hbm - slack]
        # Every second variant has the recipe's batch size, since another one is another training run.
        preferred = [one for one in fitting if len(trials) % 2 and _BATCH not in one.settings] or fitting
        next_one = max(preferred, key=lambda one: one.speed) if fitting else min(candidates, key=lambda one: one.memory)
    return trials


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without messages, which would be the same for hundreds of variants."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _candidates(config: fdl.Config[Experiment], target: CompileTarget) -> list[_Candidate]:
    """All combinations of a mesh, a remat policy and a batch size that can be sharded over the target's devices."""
    fp8_speed = find_rates(target).fp8_speed  # raises without a prediction, before any device starts
    meshes: list[tuple[Changes, MeshCosts]] = []
    session_of: dict[int, Session] = {}
    for mesh in ({}, *_meshes(config, target)):
        try:
            with open_on_target(_with(config, mesh), target) as session:
                costs = measure_mesh(session, target)
        except ConfigError:
            if not mesh:
                raise
        else:
            meshes.append((mesh, costs))
            session_of.setdefault(costs.num_stages, session)
    devices = target.devices_per_slice * target.num_slices
    rows = global_batch_size(config, devices) / devices
    others = {factor: factor * rows for factor in _ROWS if factor != 1 and factor * rows * devices >= 1}
    batches = [(factor, {_BATCH: int(one) if one.is_integer() else one}) for factor, one in others.items()]
    found: list[_Candidate] = []
    works_of = _works(session_of, fp8_speed)
    for (mesh, costs), (factor, batch) in itertools.product(meshes, ((1.0, {}), *batches)):
        works = works_of[costs.num_stages]
        with contextlib.suppress(ConfigError):  # the batch does not divide into a pipeline's microbatches
            resized = costs.times(factor)
            found += [_Candidate(mesh | policy | batch, resized, work.times(factor)) for policy, work in works]
    return found


def _works(session_of: dict[int, Session], fp8_speed: float) -> dict[int, list[tuple[Changes, Work]]]:
    """By the number of pipeline stages: the work of all remat policies that differ in it and that the devices can run.

    It is counted for the two largest numbers of stages, which have the fewest unrolled layers to trace. Between numbers
    of stages it differs by the inputs of stages that are saved.

    Args:
      session_of: A session for each number of stages.
      fp8_speed: Speed of FP8 matmuls over those in the compute dtype.
    """
    counts = sorted(session_of)[-2:]
    counted: list[tuple[Changes, list[Work]]] = []
    for policy in ({}, *_policies(session_of[counts[0]].config)):
        try:
            works = [_count_with(policy, session_of[stages], fp8_speed) for stages in counts]
        except ConfigError:  # such as offloading, where devices have no pinned host memory
            if not policy:
                raise
            continue
        if all(works != others for _, others in counted):
            counted.append((policy, works))
    few, more = counts[0], max(counts[-1] - counts[0], 1)
    return {
        stages: [(policy, works[0].toward(works[-1], (stages - few) / more)) for policy, works in counted]
        for stages in session_of
    }


def _count_with(policy: Changes, session: Session, fp8_speed: float) -> Work:
    """The work with another remat policy, which does not change the state: only the step is traced again."""
    config = with_derived_sizes(_with(session.config, policy), session.mesh.size)
    experiment = dataclasses.replace(session.experiment, task=fdl.build(config.task))
    with session.active():
        return count_work(session._replace(experiment=experiment), fp8_speed)


def _with(config: fdl.Config[Experiment], settings: Changes) -> fdl.Config[Experiment]:
    changed = copy.deepcopy(config)
    for path, value in settings.items():
        assign(changed, path, value)
    if _BATCH in settings:
        changed.task.train.global_batch_size = None
    return changed


def _meshes(config: fdl.Config[Experiment], target: CompileTarget) -> list[Changes]:
    """Other splits of the devices over `fsdp`, `tensor` and a pipeline's `stage`; the other axes keep their sizes."""
    sizes = axis_sizes(config.mesh.ici_mesh_shape, None)
    current: tuple[int, int] | None = sizes[Axis.STAGE], sizes[Axis.TENSOR]
    together = math.prod(sizes[axis] for axis in (Axis.STAGE, Axis.FSDP, Axis.TENSOR))
    if config.mesh.ici_mesh_shape is None and target.devices_per_slice > 1:  # all devices are on the data axis
        together, current = target.devices_per_slice, None
    stacks = fdl.build(config.task.model).stacks()
    pipelines = {path: stack for path, stack in stacks.items() if isinstance(stack, PipelinedStack)}
    times = _STAGES if pipelines and sizes[Axis.STAGE] > 1 else (1,)
    found: list[Changes] = []
    for more, tensor in itertools.product(times, _TENSOR):
        stage = more * sizes[Axis.STAGE]
        if together % (stage * tensor) or (stage, tensor) == current:
            continue
        shape = sizes | {Axis.STAGE: stage, Axis.FSDP: together // (stage * tensor), Axis.TENSOR: tensor}
        both = axis_sizes(shape, config.mesh.dcn_mesh_shape)
        schedule = {"num_microbatches": None, "microbatch_size": math.prod(both[axis] for axis in BATCH_AXES)}
        found.append({_MESH: {str(axis): size for axis, size in shape.items() if size > 1}})
        for path, stack in pipelines.items():
            fields = schedule | {"num_stages": more * stack.num_stages, "gather_weights_once": True}
            changed = {name: value for name, value in fields.items() if value != stack.named_fields(name)[name]}
            found[-1] |= {f"task.model.{path}.{name}": value for name, value in changed.items()}
    return found


def _policies(config: fdl.Config[Experiment]) -> list[Changes]:
    """Other remat policies, with what `save` and `offload` add to some of them."""
    stacks = fdl.build(config.task.model).stacks()
    choices = (*((policy, (), ()) for policy in get_args(RematPolicy)), *_MORE_SAVED) if stacks else ()
    options = (config.mesh.compiler_options or {}) | _TRANSFERS_AT_ONCE
    is_pipelined = any(isinstance(stack, PipelinedStack) for stack in stacks.values())
    of_offloading = {} if is_pipelined else {"mesh.compiler_options": options}
    found = []
    for policy, save, offload in choices:
        wanted = {"remat_policy": policy, "save": save, "offload": offload}
        changes: Changes = {}
        for path, stack in stacks.items():
            for field, value in wanted.items():
                if value != stack.named_fields(field)[field]:
                    changes[f"task.model.{path}.{field}"] = list(value) if isinstance(value, tuple) else value
        if offload or policy.endswith("_offloaded"):
            changes |= of_offloading
        found.append(changes)
    return found
