"""Starts a run from a MaxText checkpoint, and writes a run's checkpoint as MaxText's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import numpy as np
import optax
from etils import epath

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import listing, named_leaves, nest_by_name, read_arrays, read_manifest
from paxcli.convert.layout import Kind, Source, compare_to_model, from_pax, to_pax
from paxcli.convert.maxtext.checkpoint_files import MaxTextCheckpoint, maxtext_folder, write_maxtext
from paxcli.convert.maxtext.checkpoint_layout import Differences, MaxTextLayout, layout_of
from paxcli.convert.new_run import check_new, state_shapes, write_run
from paxcli.errors import ConfigError, DataError
from paxcli.layers.attention.rotary_scaling import Llama31Scaling
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.rms_norm import RmsNorm
from paxcli.training.experiment import Experiment

# Pax's names of Adam's moments -> MaxText's.
_MOMENTS: dict[str, Kind] = {"mu": "mu", "first_moment": "mu", "nu": "nu", "second_moment": "nu"}


@dataclasses.dataclass(frozen=True)
class ConvertedWeights:
    """A checkpoint that was converted.

    Attributes:
      source: The path that was read.
      step: The step of the new checkpoint; 0 without optimizer state.
      parameters: The number of parameters.
      with_optimizer: Whether it has the optimizer state and the step.
      scanned: Whether MaxText's layers are stacked.
      target: The path that was written; for MaxText, the directory of the tree.
    """

    source: str
    step: int
    parameters: int
    with_optimizer: bool
    scanned: bool
    target: str


class _Model:
    """The abstract state of a recipe, and how MaxText holds it.

    Raises:
      ConfigError: MaxText has no such parameters, or its optimizers no such state.
    """

    def __init__(self, config: fdl.Config[Experiment], layout: MaxTextLayout):
        self.shapes = state_shapes(config)
        self.state = named_leaves(self.shapes)
        self.params = named_leaves(self.shapes.params)
        self.moments = self._moments()
        kept = {name.split(".")[1] for name in self.moments}
        self.optimizer = "sgd" if not kept else "adam_pax" if "first_moment" in kept else "adamw"
        self.layout = layout_of(layout, list(self.params), _differences(config, layout))

    def to_pax(self, source: Source, kind: Kind) -> dict[str, np.ndarray]:
        """Parameters or moments by pax's names, in pax's dtypes."""
        return {name: x.astype(self.params[name].dtype, copy=False) for name, x in to_pax(self.layout, source, kind)}

    def from_pax(self, arrays: Source, kind: Kind) -> dict[str, Any]:
        """MaxText's tree of parameters or moments."""
        return nest_by_name(dict(from_pax(self.layout, arrays, kind)))

    def require(self, found: Mapping[str, ArrayType], where: str) -> None:
        """Raises DataError unless these are the names and shapes of this model in MaxText."""
        differences = compare_to_model(self.layout, self.params, found)
        if differences:
            raise DataError(
                f"{where} is not of this model: {differences.text()}.",
                "Give the script, or the keys and `--model`, that it was trained with, `param_scan_axis` among them.",
            )

    def _moments(self) -> dict[str, tuple[Kind, str]]:
        """The optimizer's arrays: names in pax's state -> moment, and parameter."""
        found: dict[str, tuple[Kind, str]] = {}
        for name in self.state:
            if not name.startswith("opt_state.") or name.endswith(".count"):
                continue
            part = next((part for part in _MOMENTS if f".{part}." in name), None)
            param = name.partition(f".{part}.")[2]
            if part is None or param not in self.params:
                raise ConfigError(
                    f"The recipe's optimizer keeps `{name}`, which MaxText's optimizers do not.",
                    "Supported are AdamW, Adam, and Sgd without momentum; without `ema_decay`.",
                )
            found[name] = (_MOMENTS[part], param)
        return found


def import_maxtext(
    config: fdl.Config[Experiment],
    recipe_text: str,
    checkpoint: str,
    run_dir: str | os.PathLike[str],
    layout: MaxTextLayout,
    dry_run: bool = False,
) -> ConvertedWeights:
    """Starts a run from a MaxText checkpoint: writes `recipe.yaml` and pax's checkpoint.

    A full training state resumes at its step, with its data from the beginning; parameters alone start a new run, at
    step 0. Reads one array at a time; while Orbax writes, host memory use is up to three times the size of the state.

    Args:
      config: The recipe of the same model.
      recipe_text: The recipe as YAML.
      checkpoint: MaxText's directory.
      run_dir: A run without checkpoints.
      layout: How MaxText holds the model, by the launch; the checkpoint's own structure overrides it.
      dry_run: Whether only to check.

    Raises:
      DataError: The checkpoint is not of this model; names each parameter with both shapes.
      ConfigError: The run has checkpoints, or the recipe has parts that MaxText does not have.
      MissingError: The run cannot be written.
    """
    check_new(run_dir)
    source = MaxTextCheckpoint(checkpoint)
    found = source.arrays()
    layout = dataclasses.replace(
        layout,
        scanned=not any(name.startswith("decoder.layers_0.") for name in found),
        fused_qkv=any(".qkv_proj." in name for name in found),
        fused_mlp=any(name.endswith("mlp.wi.kernel") for name in found),
    )
    layout = dataclasses.replace(layout, fused_heads=_fused_heads(config, layout, found))
    model = _Model(config, layout)
    model.require(found, str(source.path))
    if source.optimizer not in (None, model.optimizer):
        raise DataError(
            f"{source.path} has the state of {source.optimizer}, and the recipe's optimizer is {model.optimizer}.",
            f"Add opt_type={source.optimizer} to the keys.",
        )
    with_optimizer = source.optimizer is not None
    for kind in ("mu", "nu") if with_optimizer and model.moments else ():
        model.require(source.arrays(kind), f"`{kind}` in {source.path}")
    step = source.step if with_optimizer else 0
    if not dry_run:
        arrays = _state_arrays(model, source, with_optimizer)
        write_run(config, recipe_text, run_dir, model.shapes, arrays, step)
    sizes = [leaf.size for leaf in model.params.values()]
    return ConvertedWeights(str(source.path), step, sum(sizes), with_optimizer, layout.scanned, str(run_dir))


def _fused_heads(
    config: fdl.Config[Experiment], layout: MaxTextLayout, found: Mapping[str, ArrayType]
) -> tuple[int, int, int] | None:
    """Heads of query, key and value in one dimension of MaxText's array; None if it has a dimension of 3."""
    fused = next((x for name, x in found.items() if name.endswith(".qkv_proj.kernel")), None)
    if fused is None or len(fused.shape) != 3 + layout.scanned:
        return None
    model = config.task.model
    kv_heads = model.num_kv_heads or model.num_heads
    return model.num_heads, kv_heads, kv_heads


def export_maxtext(
    config: fdl.Config[Experiment],
    run_dir: str | os.PathLike[str],
    checkpoint: str,
    layout: MaxTextLayout,
    dry_run: bool = False,
) -> ConvertedWeights:
    """Writes a run's latest checkpoint as MaxText does: the full state, or at step 0 the parameters only.

    Raises:
      DataError: There is no checkpoint, or it is damaged or not of this recipe.
      ConfigError: The recipe has parts that MaxText does not have, or MaxText's directory has this step.
    """
    store = CheckpointStore(epath.Path(run_dir) / "checkpoints")
    step = store.latest_step()
    if step is None:
        raise DataError(f"There is no checkpoint in {run_dir}.", "Train it first: `pax train`.")
    model = _Model(config, layout)
    moments = model.moments if step else {}
    params = {f"params.{name}": leaf for name, leaf in model.params.items()}
    count = next((name for name in model.state if name.startswith("opt_state.") and name.endswith(".count")), None)
    wanted = params | {name: model.state[name] for name in (*moments, *([count] if count and step else []))}
    step_dir = store.directory / str(step)
    manifest = read_manifest(step_dir)
    different = [
        name
        for name, leaf in wanted.items()
        if name not in manifest.arrays or manifest.arrays[name].shape != tuple(leaf.shape)
    ]
    if different:
        raise DataError(f"{step_dir} is not of this recipe: {listing(different)}.", "Use the run's own recipe.yaml.")
    target = maxtext_folder(checkpoint, step)
    size = sum(leaf.size for leaf in model.params.values())
    done = ConvertedWeights(str(step_dir), step, size, bool(step), layout.scanned, target)
    if dry_run:
        return done
    arrays = {name: np.asarray(x) for name, x in read_arrays(step_dir, manifest, wanted).items()}
    state: dict[str, Any] = {
        "step": np.int32(step),
        "params": {"params": model.from_pax({name: arrays[f"params.{name}"] for name in model.params}, "params")},
        "opt_state": {},
    }
    if step:
        trees: dict[str, Any] = {}
        for kind in ("mu", "nu") if moments else ():
            of_kind = {param: arrays[name] for name, (found, param) in moments.items() if found == kind}
            trees[kind] = {"params": model.from_pax(of_kind, kind)}
        updates = np.int32(arrays[count] if count else step)
        state["opt_state"] = _their_optimizer(model.optimizer, trees, updates)
    write_maxtext(checkpoint, step, state)
    return done


def _their_optimizer(optimizer: str, trees: Mapping[str, Any], count: np.int32) -> Any:
    """The state of `optax.adamw`, of MaxText's `adam_pax`, or of `optax.sgd`."""
    scheduled = optax.ScaleByScheduleState(count)
    if optimizer == "sgd":
        return (optax.EmptyState(), scheduled)
    if optimizer == "adam_pax":
        return {"count": count, **trees}
    return (optax.ScaleByAdamState(count, trees["mu"], trees["nu"]), optax.EmptyState(), scheduled)


def _state_arrays(model: _Model, source: MaxTextCheckpoint, with_optimizer: bool) -> dict[str, Any]:
    """Pax's parameters, and the optimizer's state if the checkpoint has one, by name in pax's state."""
    arrays: dict[str, Any] = {
        f"params.{name}": x for name, x in model.to_pax(source.reader("params"), "params").items()
    }
    if not with_optimizer:
        return arrays
    for kind in ("mu", "nu") if model.moments else ():
        of_kind = model.to_pax(source.reader(kind), kind)
        arrays |= {name: of_kind[param] for name, (found, param) in model.moments.items() if found == kind}
    counts = {name: np.int32(source.count) for name in model.state if name.endswith(".count")}
    return arrays | counts


def _differences(config: fdl.Config[Experiment], layout: MaxTextLayout) -> Differences:
    """How the numbers of this recipe's parameters differ from MaxText's."""
    model = config.task.model
    stack_class: Any = fdl.get_callable(model.stack)
    block = model.stack.turns[0] if issubclass(stack_class, PatternedStack) else model.stack.block
    attention, norm = block.attention, block.norm
    root = fdl.build(model).head_dims ** -0.5
    ours = attention.query_scale if attention.query_scale is not None else root
    scaling = attention.rotary.scaling if attention.rotary is not None else None
    return Differences(
        query_scale=(root if layout.scales_queries else 1.0) / ours,
        norm_shift=_shift(norm),
        qk_norm_shift=_shift(attention.qk_norm),
        final_norm_shift=_shift(model.final_norm),
        adjacent_pairs=scaling is not None and fdl.get_callable(scaling) is Llama31Scaling,
    )


def _shift(norm: fdl.Partial | None) -> float:
    """Pax's scale minus MaxText's. MaxText stores the factor of an RMS norm, and the factor less 1 of a layer norm."""
    is_rms = norm is not None and fdl.get_callable(norm) is RmsNorm
    return -1.0 if is_rms and not norm.direct_scale else 0.0
