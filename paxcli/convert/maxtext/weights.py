"""Starts a run from a MaxText checkpoint, and writes a run's checkpoint as MaxText's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import numpy as np
import optax

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.manager import find_step
from paxcli.checkpoint.reading import named_leaves, nest_by_name
from paxcli.convert import runs
from paxcli.convert.layout import Kind, Layout, compare_to_model, from_pax
from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.checkpoint_files import MaxTextCheckpoint, maxtext_folder, write_maxtext
from paxcli.convert.maxtext.checkpoint_layout import MaxTextLayout, layout_of
from paxcli.convert.maxtext.recipe_to_launch import decoder_block
from paxcli.convert.runs import ExperimentConfig, ExportedWeights, ImportedWeights, PathLike
from paxcli.errors import ConfigError, DataError
from paxcli.layers.attention.rotary_scaling import Llama31Scaling
from paxcli.layers.rms_norm import RmsNorm
from paxcli.training.session import state_shapes


def import_maxtext(
    config: ExperimentConfig, recipe: str, checkpoint: PathLike, run_dir: PathLike, dry_run: bool = False
) -> ImportedWeights:
    """Starts a run from a MaxText checkpoint: writes `recipe.yaml` and pax's checkpoint.

    A full training state resumes at its step, with its data from the beginning; parameters alone start a new run, at
    step 0.

    Args:
      config: The recipe of the same model.
      recipe: The recipe as YAML.
      checkpoint: MaxText's directory.
      run_dir: A run without checkpoints.
      dry_run: Whether only to compare names and shapes.

    Raises:
      DataError: The checkpoint is not of this model; names each parameter with both shapes.
      ConfigError: The run has checkpoints, or the recipe has parts that MaxText does not have.
      MissingError: The run cannot be written.
    """
    source, shapes = MaxTextCheckpoint(checkpoint), state_shapes(config)
    params = named_leaves(shapes.params)
    optimizer = _optimizer(named_leaves(shapes))
    if source.optimizer not in (None, optimizer):
        problem = f"{source.path} has the state of {source.optimizer}, and the recipe's optimizer is {optimizer}."
        raise DataError(problem, f"Add opt_type={source.optimizer} to the keys.")
    rules = _layout_in(source, config, params)
    hint = "Give the recipe of the launch that it was trained with: `pax maxtext-convert`."
    return runs.import_checkpoint(source, rules, config, recipe, shapes, run_dir, decoder_block(config), hint, dry_run)


def _layout_in(source: MaxTextCheckpoint, config: ExperimentConfig, params: Mapping[str, ArrayType]) -> Layout:
    """The rules for a checkpoint: its names and shapes tell how it holds the model."""
    found, block = source.arrays(), decoder_block(config)
    layout = MaxTextLayout(
        block,
        config.task.model.num_layers,
        scanned=not any(name.startswith("decoder.layers_0.") for name in found),
        fused_qkv=any(".qkv_proj." in name for name in found),
        fused_mlp=any(name.endswith("mlp.wi.kernel") for name in found),
    )
    fused = next((x for name, x in found.items() if name.endswith(".qkv_proj.kernel")), None)
    if fused is not None and len(fused.shape) == 3 + layout.scanned:  # heads of all three in one dimension
        heads, kv_heads = config.task.model.num_heads, config.task.model.num_kv_heads or config.task.model.num_heads
        layout = dataclasses.replace(layout, fused_heads=(heads, kv_heads, kv_heads))
    layout = _with_differences(config, layout)
    names = (block, *tables.with_other_norm_names(block))  # a recipe does not tell these apart
    axes = (1, 0) if layout.scanned else (1,)
    layouts = [dataclasses.replace(layout, block=name, scan_axis=axis) for name in names for axis in axes]
    every = [layout_of(one, params) for one in layouts]
    return next((rules for rules in every if not compare_to_model(rules, params, found)), every[0])


def _optimizer(state: Mapping[str, ArrayType]) -> str:
    """MaxText's name of the optimizer with this state."""
    moments = [name for name, (kind, _) in runs.arrays_per_parameter(state).items() if kind != "ema"]
    return "sgd" if not moments else "adam_pax" if any(".first_moment." in name for name in moments) else "adamw"


def export_maxtext(
    config: ExperimentConfig, run_dir: PathLike, checkpoint: PathLike, step: int | None = None, dry_run: bool = False
) -> ExportedWeights:
    """Writes a run's checkpoint as MaxText does: the full state, or at step 0 the parameters only.

    Moving averages are left out: MaxText has none.

    Args:
      config: The run's recipe.
      run_dir: The run.
      checkpoint: MaxText's directory of all steps.
      step: The checkpoint; None = the latest.
      dry_run: Whether only to check.

    Raises:
      DataError: There is no checkpoint, or it is damaged or not of this recipe.
      ConfigError: The recipe has parts that MaxText does not have, or MaxText's directory has this step.
    """
    step, shapes = find_step(run_dir, step), state_shapes(config)
    state, params = named_leaves(shapes), named_leaves(shapes.params)
    if any(name.startswith(("stack.stages.", "stack.repeats.")) for name in params):
        problem = "The layers of this recipe are in the stages of a pipeline, and pax writes MaxText's layers without."
        raise ConfigError(problem, "Train it without its pipeline before: `pax train RECIPE --from RUN_DIR`.")
    model = config.task.model
    layout = MaxTextLayout(decoder_block(config), model.num_layers, scanned=model.stack.scan)
    rules = layout_of(_with_differences(config, layout), params)
    kept = runs.arrays_per_parameter(state) if step else {}
    counts = [name for name in state if name.endswith(".count")] if step else []
    wanted: dict[str, tuple[Kind, str]] = {f"params.{name}": ("params", name) for name in params}
    wanted |= {name: found for name, found in kept.items() if found[0] != "ema"}
    arrays = runs.read_run(run_dir, step, {name: state[name] for name in (*wanted, *counts)})
    target = maxtext_folder(checkpoint, step)
    size = sum(x.size for x in params.values())
    left_out = ["moving averages"] if any(kind == "ema" for kind, _ in kept.values()) else []
    done = ExportedWeights(os.fspath(run_dir), step, target, layout.block, "float32", bool(step), size, [], left_out)
    if dry_run:
        return done
    zeros = {name: np.zeros(x.shape, x.dtype) for name, x in params.items()}  # moments of frozen parameters
    named = {kind: {**zeros} for kind, _ in wanted.values()}
    for name, (kind, parameter) in wanted.items():
        named[kind][parameter] = arrays[name]
    trees = {kind: {"params": nest_by_name(dict(from_pax(rules, x, kind)))} for kind, x in named.items()}
    count = np.int32(arrays[counts[0]] if counts else step)
    opt_state = _their_optimizer(_optimizer(state), trees, count) if step else {}
    write_maxtext(checkpoint, step, {"step": np.int32(step), "params": trees["params"], "opt_state": opt_state})
    return done


def _their_optimizer(optimizer: str, trees: Mapping[Kind, Any], count: np.int32) -> Any:
    """The state of `optax.adamw`, of MaxText's `adam_pax`, or of `optax.sgd`."""
    scheduled = optax.ScaleByScheduleState(count)
    if optimizer == "sgd":
        return (optax.EmptyState(), scheduled)
    if optimizer == "adam_pax":
        return {"count": count, "mu": trees["mu"], "nu": trees["nu"]}
    return (optax.ScaleByAdamState(count, trees["mu"], trees["nu"]), optax.EmptyState(), scheduled)


def _with_differences(config: ExperimentConfig, layout: MaxTextLayout) -> MaxTextLayout:
    """A layout with the differences between the numbers of this recipe's parameters and MaxText's."""
    model = config.task.model
    block = runs.layer_kinds(model)[0][0]
    attention, norm = block.attention, block.norm
    root = fdl.build(model).head_dims ** -0.5
    ours = attention.query_scale if attention.query_scale is not None else root
    scaling = attention.rotary.scaling if attention.rotary is not None else None
    return dataclasses.replace(
        layout,
        query_scale=(root if tables.blocks()[layout.block].get("scales_queries") else 1.0) / ours,
        norm_shift=_shift(norm),
        qk_norm_shift=_shift(attention.qk_norm),
        final_norm_shift=_shift(model.final_norm),
        adjacent_pairs=scaling is not None and fdl.get_callable(scaling) is Llama31Scaling,
    )


def _shift(norm: fdl.Partial | None) -> float:
    """Pax's scale minus MaxText's. MaxText stores the factor of an RMS norm, and the factor less 1 of a layer norm."""
    return -1.0 if norm is not None and fdl.get_callable(norm) is RmsNorm and not norm.direct_scale else 0.0
