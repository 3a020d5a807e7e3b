"""The root of a recipe, the values that are derived before it is built, and its sizes, computed without any device."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import fiddle as fdl

from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.classes import class_of
from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import NotCompiled, SafeOnResume
from paxcli.config.tree import check_one_is_set
from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput, Prompts
from paxcli.layers.lora import ADAPTERS, REFERENCE
from paxcli.mesh.mesh import Mesh
from paxcli.metrics.trackers import Tracker
from paxcli.models.dpo import REJECTED
from paxcli.models.sampling import Decoding, Sampling
from paxcli.training.state import abstract_params, count_parameters
from paxcli.training.task import SingleTask


@dataclasses.dataclass
class Experiment(Configurable):
    """One training run: the task, the data, the device mesh, and the checkpoint policy.

    Attributes:
      task: The model and how it is trained.
      train_input: Batches to train on.
      eval_inputs: Data to evaluate on, each with a name.
      decode_inputs: Default prompts of `pax decode`: texts, or inputs, which may have metrics of their own.
      decoding: How text is generated: `Sampling`, greedy by default, or `BeamSearch`.
      sample_prompts: Texts that the model continues after each evaluation, for `samples.jsonl`.
      writers: Trackers that receive the metrics too: `wandb`, `mlflow`.
      mesh: The device mesh.
      checkpoint: When to save checkpoints, and which to keep.
    """

    task: SingleTask
    train_input: NotCompiled[BaseInput]
    eval_inputs: SafeOnResume[NotCompiled[list[BaseInput]]] = dataclasses.field(default_factory=list)
    decode_inputs: SafeOnResume[NotCompiled[list[Prompts | BaseInput]]] = dataclasses.field(default_factory=list)
    decoding: SafeOnResume[NotCompiled[Decoding]] = part(Sampling)
    sample_prompts: SafeOnResume[NotCompiled[list[str]]] = dataclasses.field(default_factory=list)
    writers: SafeOnResume[NotCompiled[list[Tracker]]] = dataclasses.field(default_factory=list)
    mesh: SafeOnResume[Mesh] = part(Mesh)
    checkpoint: SafeOnResume[NotCompiled[Checkpoint]] = part(Checkpoint)


def global_batch_size(config: fdl.Config[Experiment], num_devices: int) -> int:
    """Examples per step, over all devices.

    Raises:
      ConfigError: Neither or both of the two batch sizes are given, or the global batch is not a whole number.
    """
    train = config.task.train
    check_one_is_set(train, "global_batch_size", "percore_batch_size", "global_batch_size=32")
    given, percore = train.global_batch_size, train.percore_batch_size
    batch = percore * num_devices if given is None else given
    if batch != int(batch) or batch < 1:
        problem = f"percore_batch_size={percore} × {num_devices} devices = {batch:g} is not a whole batch."
        raise ConfigError(problem, "Set `global_batch_size`, or `mesh.ici_mesh_shape`: without it, one device counts.")
    return int(batch)


def with_derived_sizes(
    config: fdl.Config[Experiment], num_devices: int, num_infeed_hosts: int = 1, infeed_host_index: int = 0
) -> fdl.Config[Experiment]:
    """A copy of the recipe with the derived values filled in.

    Inputs get their share of the batch, the model's `input_sizes` and the run's seed; a schedule without an end gets
    that of the run, or the first step of its decay if the run ends before, or has epochs, which only its start counts;
    a learner without regular expressions trains only the adapters, if the model has any; and the copy of the parameters
    that the loss compares with is frozen.
    """
    config = copy.deepcopy(config)
    train, model = config.task.train, fdl.build(config.task.model)
    batch = global_batch_size(config, num_devices)
    check_one_is_set(train, "num_train_steps", "num_train_epochs", "num_train_epochs=3")
    if batch % num_infeed_hosts:
        hint = "Change the batch size, or the number of hosts."
        raise ConfigError(f"A global batch of {batch} does not divide over {num_infeed_hosts} hosts.", hint)
    learner = train.learner
    if model.lora is not None and not learner.bprop_variable_exclusion:
        learner.bprop_variable_inclusion = learner.bprop_variable_inclusion or (ADAPTERS,)
    if model.keeps_reference:
        if learner.bprop_variable_inclusion:
            raise ConfigError("`dpo` has no `bprop_variable_inclusion`.", "Use `bprop_variable_exclusion`, or LoRA.")
        learner.bprop_variable_exclusion = (*learner.bprop_variable_exclusion, f"^{REFERENCE}/")
    for schedule in filter(None, (learner.schedule, *(group.schedule for group in learner.parameter_groups))):
        steps = fdl.ordered_arguments(schedule, include_defaults=True)
        first = max(steps.get("warmup_steps", 0) * steps.get("worker_replicas", 1), steps.get("decay_start") or 0)
        for end in ("decay_end", "total_steps"):
            _fill(schedule, end, max((train.num_train_steps or 1) - steps.get("start_step", 0), first))
    shared, decoded = (config.train_input, *config.eval_inputs), data_of(config.decode_inputs)
    for source in shared:
        source.num_infeed_hosts, source.infeed_host_index = num_infeed_hosts, infeed_host_index
    rows = [batch // num_infeed_hosts] * len(shared) + [batch] * len(decoded)  # each process decodes all of it
    for source, batch_size in zip((*shared, *decoded), rows, strict=True):
        cls: Any = fdl.get_callable(source)
        sizes = model.input_sizes._asdict() | {"batch_size": None if cls.sizes_own_batches else batch_size}
        for field, size in sizes.items():
            _fill(source, field, size)
    config.train_input.is_training = True
    _fill(config.train_input, "input_random_seed", train.random_seed)
    return config


def data_of(decode_inputs: Iterable[Any]) -> list[Any]:
    """The entries of `decode_inputs`, or their configs, that are inputs rather than prompts."""
    return [one for one in decode_inputs if issubclass(class_of(one) or object, BaseInput)]


def num_devices(config: fdl.Config[Experiment]) -> int:
    """Devices of the recipe's mesh; 1 if the mesh takes any number."""
    return fdl.build(config.mesh).num_devices() or 1


def tokens_in(spec: Any) -> int | None:
    """Tokens in a batch of these shapes, those of rejected rows included; None if it has no `labels` [B, T]."""
    labels = [rows["labels"] for rows in (spec, spec.get(REJECTED, {})) if "labels" in rows]
    return sum(math.prod(x.shape) for x in labels) if labels and len(labels[0].shape) == 2 else None


def summarize(config: fdl.Config[Experiment]) -> dict[str, Any]:
    """Sizes of a recipe: `parameters`, `global_batch_size`, `tokens_per_step`, `flops_per_step`, `num_devices`."""
    devices = num_devices(config)
    experiment = fdl.build(with_derived_sizes(config, devices))
    spec = experiment.train_input.element_spec()
    flops = experiment.task.model.step_flops(spec)
    return {
        "parameters": count_parameters(abstract_params(experiment.task, spec)),
        "global_batch_size": global_batch_size(config, devices),
        "tokens_per_step": tokens_in(spec),
        "flops_per_step": round(flops.total) if flops else None,
        "num_devices": devices,
    }


def _fill(config: fdl.Config, field: str, value: object) -> None:
    """Sets a field to a value other than None, if the class has it and the recipe leaves it at None."""
    fields = fdl.ordered_arguments(config, include_defaults=True)
    if value is not None and field in fields and fields[field] is None:
        setattr(config, field, value)
