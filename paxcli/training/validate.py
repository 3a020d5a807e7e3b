"""Checks of a recipe that need no device, no data and no computation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import fiddle as fdl
import flax.linen as nn
import jax

from paxcli.config.assign import fit_types
from paxcli.config.fields import DropoutRate
from paxcli.config.tree import check_ranges, is_at_or_below, walk
from paxcli.errors import ConfigError, MeshError
from paxcli.layers.lora import Lora
from paxcli.layers.pipeline import Pipeline
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.log import log
from paxcli.mesh.axes import BATCH_AXES, Axis
from paxcli.mesh.mesh import axis_sizes
from paxcli.mesh.weights import match_parameters, parameter_names, weights_of
from paxcli.models.base import Model
from paxcli.models.language_model import LanguageModel
from paxcli.training.experiment import Experiment, data_of, global_batch_size, with_derived_sizes
from paxcli.training.state import abstract_params
from paxcli.training.summaries import ACTIVATIONS


def validate(config: fdl.Config[Experiment], num_devices: int | None = None, reads_data: bool = True) -> None:
    """Checks that the parts of a recipe fit each other. Uses no device.

    Opens no file, except for an input that has to read a batch to know its shapes, in a recipe that selects parameters
    by regular expressions.

    Args:
      config: The recipe.
      num_devices: Devices that will run it; None = those of its mesh.
      reads_data: Whether its inputs will be read, so that they have to name their data.

    Raises:
      ConfigError: With the arithmetic, and the field to change.
    """
    fit_types(config)
    check_ranges(config)
    mesh = fdl.build(config.mesh)
    mesh.validate()
    fdl.build(config.checkpoint).validate()
    sizes = axis_sizes(mesh.ici_sizes(num_devices or 1), mesh.dcn_mesh_shape)
    devices = math.prod(sizes.values())
    model = fdl.build(config.task.model)
    model.validate(sizes)
    _check_batch(config, sizes, devices)
    ready = with_derived_sizes(config, devices)
    learner = fdl.build(ready.task.train.learner)
    learner.validate()
    _check_pipeline(ready, model, sizes, global_batch_size(config, devices), log_it=num_devices is not None)
    for source in (ready.train_input, *ready.eval_inputs, *data_of(ready.decode_inputs)) if reads_data else ():
        fdl.build(source).validate()
    if model.lora is not None and reads_data and num_devices is None:
        _check_lora(ready, model, model.lora)
    _check_inputs(config, ready, model)
    fdl.build(config.task.early_stopping_fn).validate([fdl.build(source).name for source in ready.eval_inputs])
    is_trained = "mtp_loss" in config.task.loss_aggregator.loss_keys
    if isinstance(model, LanguageModel) and model.mtp_num_layers and not is_trained and num_devices is not None:
        log.warning("The layers of `mtp_num_layers` get no gradient: task.loss_aggregator.loss_keys lacks `mtp_loss`.")
    if learner.selects_parameters and reads_data and num_devices is None:
        spec = fdl.build(ready.train_input).element_spec()
        learner.select_trained(nn.meta.unbox(abstract_params(fdl.build(ready.task), spec)))


def _check_batch(config: Any, sizes: dict[str, int], devices: int) -> None:
    train = config.task.train
    batch, microbatches = global_batch_size(config, devices), train.num_microbatches
    if train.learner.stochastic_gradient is not None:
        microbatches *= train.learner.stochastic_gradient.microbatch_size
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    if batch % (shards * microbatches):
        arithmetic = f"data={sizes[Axis.DATA]} × fsdp={sizes[Axis.FSDP]}"
        arithmetic += f" × expert={sizes[Axis.EXPERT]}" if sizes[Axis.EXPERT] > 1 else ""
        arithmetic += f" × {microbatches} microbatches" if microbatches > 1 else ""
        nearest = max(1, round(batch / (shards * microbatches))) * shards * microbatches
        hint = f"The nearest batch that divides: `--set global_batch_size={nearest}`."
        raise MeshError(f"A global batch of {batch} does not divide over {arithmetic} = {shards * microbatches}.", hint)


def _check_pipeline(config: Any, model: Model, sizes: dict[str, int], batch: int, log_it: bool) -> None:
    on_mesh = sizes[Axis.STAGE]
    pipelined = {path: stack for path, stack in model.stacks().items() if isinstance(stack, PipelinedStack)}
    if not pipelined and on_mesh > 1:
        hint = "Use another axis in `mesh.ici_mesh_shape` and `mesh.dcn_mesh_shape`, or a pipelined recipe."
        problem = f"The mesh has stage={on_mesh}, but the model has no pipeline stages: devices would repeat work."
        raise ConfigError(problem, hint)
    if config.task.summary_verbosity >= ACTIVATIONS and (pipelined or config.task.train.learner.stochastic_gradient):
        lacking = "pipeline stages do" if pipelined else "DP-SGD does"
        problem = f"task.summary_verbosity={config.task.summary_verbosity} logs statistics of activations"
        raise ConfigError(f"{problem}, which {lacking} not report.", f"Set it to {ACTIVATIONS - 1} at most.")
    for node in walk(config.task.model) if pipelined else ():
        if node.annotation == DropoutRate and node.value and is_at_or_below(node.path, (*pipelined, "lora")):
            hint = "Set it to 0, or use a recipe without pipeline."
            raise ConfigError(f"Pipeline stages have no dropout, and task.model.{node.path}={node.value}.", hint)
    for path, stack in pipelined.items():
        stack.pipeline.layers_per_group(stack.num_layers)
        if on_mesh not in (1, stack.num_stages):
            problem = f"task.model.{path}.num_stages={stack.num_stages}, but the mesh has stage={on_mesh}."
            product = "the product of `stage` in `mesh.ici_mesh_shape` and `mesh.dcn_mesh_shape`"
            raise ConfigError(problem, f"Make {product} {stack.num_stages}; with 1, each device runs all stages.")
        _check_microbatches(config, stack.pipeline, sizes, batch, log_it)


def _check_microbatches(config: Any, pipeline: Pipeline, sizes: dict[str, int], batch: int, log_it: bool) -> None:
    rows = batch // config.task.train.num_microbatches
    size = rows // pipeline.count_microbatches(rows)
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    if size % shards and log_it:
        message = "Microbatches of %d rows do not divide over %s = %d: they are replicated."
        log.warning(message, size, " × ".join(BATCH_AXES), shards)
    for source in config.eval_inputs:
        if source.batch_size is not None:
            pipeline.count_microbatches(source.batch_size)


def _check_lora(config: Any, model: Model, lora: Lora) -> None:
    task = dataclasses.replace(fdl.build(config.task), model=model.clone(lora=None))
    weights = weights_of(abstract_params(task, fdl.build(config.train_input).element_spec()))
    named = zip(parameter_names(weights), jax.tree.leaves(weights), strict=True)
    matrices = [name for name, weight in named if weight.is_matrix and not weight.is_table]
    match_parameters("lora.targets", lora.targets, matrices)


def _check_inputs(given: Any, config: Any, model: Model) -> None:
    paths = ["train_input", *(f"eval_inputs.{i}" for i in range(len(config.eval_inputs)))]
    limit = model.input_sizes.seq_len
    for path, source in zip(paths, (given.train_input, *given.eval_inputs), strict=True):
        length = fdl.ordered_arguments(source, include_defaults=True).get("seq_len")
        if length and limit and length > limit:
            hint = f"Lower `{path}.seq_len`, or raise `max_seq_len`."
            raise ConfigError(f"{path}.seq_len={length} is longer than task.model.max_seq_len={limit}.", hint)
        for field, value in fdl.ordered_arguments(source).items():
            if value and field in ("num_infeed_hosts", "infeed_host_index"):
                raise ConfigError(f"{path}.{field}={value} has no effect: a run sets it itself.", "Remove it.")
    if given.train_input.__arguments__.get("is_training") is False:
        raise ConfigError("train_input.is_training=False has no effect: a run sets it to True.", "Remove it.")
    for kind, sources in (("evaluation", config.eval_inputs), ("decode", data_of(config.decode_inputs))):
        names = [source.name or "input" for source in sources]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"Two {kind} inputs are called `{repeated[0]}`.", "Give each its own `name`.")
