"""The root of a recipe, and what it derives from itself before it is built."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import fiddle as fdl

from paxcli.checkpoint.policy import Checkpoint
from paxcli.config.configurable import Configurable, part
from paxcli.config.fields import NotCompiled, SafeOnResume
from paxcli.errors import ConfigError
from paxcli.inputs.base_input import BaseInput, Prompts
from paxcli.mesh.mesh import Mesh
from paxcli.training.task import SingleTask


@dataclasses.dataclass
class Experiment(Configurable):
    """One run: what is trained, on what data, on which devices, and what is kept.

    Attributes:
      task: The model and how it is trained.
      train_input: Batches to train on.
      eval_inputs: Data to evaluate on, each with a name.
      decode_inputs: What `pax decode` continues when it is given no prompt: prompts, and data with metrics of its own.
      mesh: How devices are arranged.
      checkpoint: When to save, and what to keep.
    """

    task: SingleTask
    train_input: NotCompiled[BaseInput]
    eval_inputs: SafeOnResume[NotCompiled[list[BaseInput]]] = dataclasses.field(default_factory=list)
    decode_inputs: SafeOnResume[NotCompiled[list[Prompts | BaseInput]]] = dataclasses.field(default_factory=list)
    mesh: SafeOnResume[Mesh] = part(Mesh)
    checkpoint: SafeOnResume[NotCompiled[Checkpoint]] = part(Checkpoint)


def global_batch_size(config: fdl.Config[Experiment], num_devices: int) -> int:
    """Examples in a step over all devices.

    Raises:
      ConfigError: Neither or both of the two batch sizes are given, or a fractional one does not add up.
    """
    train = config.task.train
    whole, percore = train.global_batch_size, train.percore_batch_size
    if (whole is None) == (percore is None):
        problem = (
            "Neither `global_batch_size` nor `percore_batch_size` is set"
            if whole is None
            else (f"Both `global_batch_size` ({whole}) and `percore_batch_size` ({percore}) are set")
        )
        raise ConfigError(f"{problem}.", "Set one of them, for example `--set global_batch_size=32`.")
    batch = whole if whole is not None else percore * num_devices
    if batch != int(batch) or batch < 1:
        raise ConfigError(f"percore_batch_size={percore} × {num_devices} devices = {batch:g} is not a whole batch.")
    return int(batch)


def prepared(
    config: fdl.Config[Experiment], num_devices: int, num_infeed_hosts: int = 1, infeed_host_index: int = 0
) -> fdl.Config[Experiment]:
    """A copy with everything filled in that a recipe leaves to be derived.

    Inputs get their share of the batch, the model's sequence length and vocabulary, and the run's seed; a schedule
    without an end gets the run's.
    """
    config = copy.deepcopy(config)
    train, model = config.task.train, config.task.model
    batch = global_batch_size(config, num_devices)
    if batch % num_infeed_hosts:
        raise ConfigError(f"A global batch of {batch} does not divide over {num_infeed_hosts} hosts.")
    for end in ("decay_end", "total_steps"):
        _fill(train.learner.schedule, end, train.num_train_steps)
    shared, decoded = (config.train_input, *config.eval_inputs), data_of(config.decode_inputs)
    for source in shared:
        _fill(source, "batch_size", batch // num_infeed_hosts)
        source.num_infeed_hosts, source.infeed_host_index = num_infeed_hosts, infeed_host_index
    for source in decoded:  # each process decodes all of it
        _fill(source, "batch_size", batch)
    for source in (*shared, *decoded):
        for field, of_model in (
            ("seq_len", "max_seq_len"),
            ("vocab_size", "vocab_size"),
            ("num_classes", "num_classes"),
        ):
            _fill(source, field, getattr(model, of_model, None))
    config.train_input.is_training = True
    _fill(config.train_input, "input_random_seed", train.random_seed)
    return config


def data_of(decode_inputs: Iterable[Any]) -> list[Any]:
    """Those of `decode_inputs`, or of their configs, that are data rather than prompts."""
    kinds = [(fdl.get_callable(one) if isinstance(one, fdl.Buildable) else type(one), one) for one in decode_inputs]
    return [one for kind, one in kinds if isinstance(kind, type) and issubclass(kind, BaseInput)]


def _fill(config: fdl.Config, field: str, value: object) -> None:
    """Sets a field that the class has and the recipe leaves at None."""
    cls = fdl.get_callable(config)
    if field == "batch_size" and getattr(cls, "sizes_own_batches", False):
        return
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if field in names and value is not None and getattr(config, field) is None:
        setattr(config, field, value)
