"""What can be known to be wrong before any device, download or step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import fiddle as fdl

from paxcli.config.classes import class_of
from paxcli.config.facts import check_ranges
from paxcli.errors import ConfigError
from paxcli.layers.pipeline import Pipeline
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.log import log
from paxcli.mesh.axes import BATCH_AXES, Axis
from paxcli.mesh.mesh import axis_sizes
from paxcli.training.experiment import Experiment, data_of, global_batch_size, prepared


def validate(config: fdl.Config[Experiment], num_devices: int | None = None, reads_data: bool = True) -> None:
    """Checks that the parts of a recipe fit each other. Opens no file and touches no device.

    Args:
      config: The recipe.
      num_devices: Devices that will run it; None = those that its mesh names.
      reads_data: Whether its inputs will be read, and so have to say where their data is.

    Raises:
      ConfigError: With the arithmetic, and the field to change.
    """
    check_ranges(config)
    mesh = fdl.build(config.mesh)
    mesh.validate()
    fdl.build(config.checkpoint).validate()
    sizes = axis_sizes(mesh.ici_mesh_shape or {Axis.DATA: num_devices or 1}, mesh.dcn_mesh_shape)
    devices = math.prod(sizes.values())
    _check_model(config.task.model, sizes)
    _check_batch(config, sizes, devices)
    ready = prepared(config, devices)
    fdl.build(ready.task.train.learner).validate()
    _check_pipeline(ready, sizes, global_batch_size(config, devices), log_it=num_devices is not None)
    for source in (ready.train_input, *ready.eval_inputs, *data_of(ready.decode_inputs)) if reads_data else ():
        fdl.build(source).validate()
    _check_inputs(ready)


def _check_model(model: Any, sizes: dict[str, int]) -> None:
    heads, kv_heads = getattr(model, "num_heads", None), getattr(model, "num_kv_heads", None)
    if heads and not getattr(model, "dims_per_head", None) and model.model_dims % heads:
        raise ConfigError(
            f"model_dims={model.model_dims} does not divide into num_heads={heads} heads.",
            "Change one of them, or set `dims_per_head`.",
        )
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(f"num_kv_heads={kv_heads} does not divide num_heads={heads}.")
    for axis, fields in ((Axis.TENSOR, ("num_heads", "num_kv_heads", "hidden_dims")), (Axis.FSDP, ("model_dims",))):
        for field in fields:
            size = getattr(model, field, None)
            if size and size % sizes[axis]:
                raise ConfigError(
                    f"task.model.{field}={size} does not divide over mesh axis {axis}={sizes[axis]} "
                    f"({size} / {sizes[axis]} = {size / sizes[axis]:g}).",
                    f"Change `{field}` or the size of `{axis}` in `mesh.ici_mesh_shape`.",
                )


def _check_batch(config: Any, sizes: dict[str, int], devices: int) -> None:
    batch, microbatches = global_batch_size(config, devices), config.task.train.num_microbatches
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    if batch % (shards * microbatches):
        arithmetic = f"data={sizes[Axis.DATA]} × fsdp={sizes[Axis.FSDP]}"
        arithmetic += f" × expert={sizes[Axis.EXPERT]}" if sizes[Axis.EXPERT] > 1 else ""
        arithmetic += f" × {microbatches} microbatches" if microbatches > 1 else ""
        nearest = max(1, round(batch / (shards * microbatches))) * shards * microbatches
        raise ConfigError(
            f"A global batch of {batch} does not divide over {arithmetic} = {shards * microbatches}.",
            f"The nearest batch that does: `--set global_batch_size={nearest}`.",
        )


def _check_pipeline(config: Any, sizes: dict[str, int], batch: int, log_it: bool) -> None:
    model, on_mesh = config.task.model, sizes[Axis.STAGE]
    stack = getattr(model, "stack", None)
    if class_of(stack) is not PipelinedStack:
        if on_mesh > 1:
            raise ConfigError(
                f"The mesh has stage={on_mesh}, but the model has no stages: devices would repeat each other's work.",
                "Use another axis in `mesh.ici_mesh_shape` and `mesh.dcn_mesh_shape`, or a pipelined recipe.",
            )
        return
    pipeline = Pipeline(**{field.name: getattr(stack, field.name) for field in dataclasses.fields(Pipeline)})
    pipeline.layers_per_group(model.num_layers)
    if on_mesh not in (1, pipeline.num_stages):
        raise ConfigError(
            f"task.model.stack.num_stages={pipeline.num_stages}, but the mesh has stage={on_mesh}.",
            f"Make the product of `stage` in `mesh.ici_mesh_shape` and `mesh.dcn_mesh_shape` {pipeline.num_stages}; "
            "1 runs all stages on each device.",
        )
    rows = batch // config.task.train.num_microbatches
    size = rows // pipeline.count_microbatches(rows)
    shards = math.prod(sizes[axis] for axis in BATCH_AXES)
    if size % shards and log_it:
        log.warning(
            "Microbatches of %d rows do not divide over %s = %d: each device runs them whole.",
            size,
            " × ".join(BATCH_AXES),
            shards,
        )
    for source in config.eval_inputs:
        if source.batch_size is not None:
            pipeline.count_microbatches(source.batch_size)


def _check_inputs(config: Any) -> None:
    model = config.task.model
    named = [("train_input", config.train_input)]
    named += [(f"eval_inputs.{i}", source) for i, source in enumerate(config.eval_inputs)]
    for kind, sources in (("evaluation", config.eval_inputs), ("decode", data_of(config.decode_inputs))):
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"Two {kind} inputs are called `{name}`.", "Give each a `name` of its own.")
    for path, source in named:
        length, limit = getattr(source, "seq_len", None), getattr(model, "max_seq_len", None)
        if length and limit and length > limit:
            raise ConfigError(
                f"{path}.seq_len={length} is longer than task.model.max_seq_len={limit}.",
                f"Lower `{path}.seq_len`, or raise `max_seq_len`.",
            )
