"""Shared by all formats: builds recipes, starts runs from converted weights, reads the arrays of runs for export."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import fiddle as fdl
import jax
import numpy as np
from etils import epath

from paxcli.checkpoint.array_differences import ArrayDifferences, ArrayType
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.reading import listing, named_leaves, read_arrays, read_manifest
from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.convert.layout import Kind, Layout, Source, compare_to_model, fill_pax
from paxcli.errors import ConfigError, DataError
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.training.experiment import Experiment, with_derived_sizes
from paxcli.training.run_dir import RunDir
from paxcli.training.start_from import write_run
from paxcli.training.state import TrainState

PathLike = str | os.PathLike[str]
ExperimentConfig = fdl.Config[Experiment]
# Name, config and YAML of a recipe.
Recipe = tuple[str, ExperimentConfig, str]

# Names of the trees in pax's optimizer states that have an array for each parameter.
_PER_PARAMETER: dict[str, Kind] = {
    "ema": "ema", "mu": "mu", "first_moment": "mu", "nu": "nu", "second_moment": "nu",
}  # fmt: skip


class ForeignCheckpoint(Protocol):
    """A checkpoint of another format. Reads one tensor at a time.

    Attributes:
      path: Its directory.
      step: Number of completed steps.
      count: Number of the optimizer's updates; None = it has no optimizer state.
    """

    @property
    def path(self) -> os.PathLike[str]: ...

    @property
    def step(self) -> int: ...

    @property
    def count(self) -> int | None: ...

    def arrays(self, kind: Kind = "params") -> Mapping[str, ArrayType]:
        """Name -> shape and dtype of each tensor of a kind."""

    def reader(self, kind: Kind = "params") -> Source:
        """Reads these tensors into host memory."""


@dataclasses.dataclass(frozen=True)
class ImportedWeights:
    """Weights that were imported, or would be.

    Attributes:
      source: Directory of the weights.
      run_dir: The new run.
      family: The `model_type` of Hugging Face, MaxText's `decoder_block`, or the recipe of a paxml checkpoint.
      recipe: The recipe as YAML.
      step: The step of the new checkpoint; 0 without optimizer state.
      with_optimizer: Whether the optimizer's state was imported, too.
      parameters: The number of parameters.
      num_bytes: Size of the tensors that were read.
      seconds: Time that reading and writing took; 0 if nothing was written.
      tensors: Names that match, are missing, unexpected, or have another shape.
      carried: Names of the files that were copied.
      not_imported: Settings of generation that pax does not have.
      left_out: Modules of a multimodal model that were not imported, such as `vision_tower`.
    """

    source: str
    run_dir: str
    family: str
    recipe: str
    step: int
    with_optimizer: bool
    parameters: int
    num_bytes: int
    seconds: float
    tensors: ArrayDifferences
    carried: list[str]
    not_imported: list[str] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ExportedWeights:
    """Weights that were exported.

    Attributes:
      run_dir: The run.
      step: The checkpoint's.
      directory: The new directory; of MaxText, that of the tree in it.
      family: The `model_type` of Hugging Face, or MaxText's `decoder_block`.
      dtype: Of the parameters.
      with_optimizer: Whether the optimizer's state was exported, too.
      parameters: The number of parameters.
      files: Names of the files; empty for MaxText.
      left_out: What the run has and the format does not: `moving averages`, or modules such as `mtp_0`.
    """

    run_dir: str
    step: int
    directory: str
    family: str
    dtype: str
    with_optimizer: bool
    parameters: int
    files: list[str]
    left_out: list[str] = dataclasses.field(default_factory=list)


def recipe_with(name: str, values: Mapping[str, Any]) -> ExperimentConfig:
    """The config of a recipe with values assigned, path by path."""
    config = load(name).config
    for path, value in values.items():
        assign(config, path, value)
    return config


def layer_kinds(model: fdl.Config) -> tuple[list[fdl.Config], int]:
    """Templates of a model's layers, several if interleaved; and how many layers of another kind are before them."""
    if issubclass(fdl.get_callable(model.stack), PatternedStack):  # pyrefly: ignore
        return model.stack.turns, model.stack.num_first
    return [model.stack.block], 0


def arrays_per_parameter(state: Mapping[str, ArrayType]) -> dict[str, tuple[Kind, str]]:
    """The optimizer's arrays but for its counts: name in the state -> kind, and the parameter that it belongs to.

    Raises:
      ConfigError: The optimizer keeps something that other formats do not.
    """
    found: dict[str, tuple[Kind, str]] = {}
    for name in state:
        if not name.startswith("opt_state.") or name.endswith(".count"):
            continue
        part = next((part for part in _PER_PARAMETER if f".{part}." in name), "")
        parameter = name.partition(f".{part}.")[2]
        # Lion has one moment, `mu`.
        if not (part and name.replace(".mu.", ".nu.", 1) in state and f"params.{parameter}" in state):
            problem = f"The recipe's optimizer keeps `{name}`, which the optimizers of other formats do not."
            raise ConfigError(problem, "Supported are AdamW, Adam, and Sgd without momentum.")
        found[name] = (_PER_PARAMETER[part], parameter)
    return found


def import_checkpoint(
    source: ForeignCheckpoint,
    layout: Layout,
    config: ExperimentConfig,
    recipe: str,
    shapes: TrainState,
    run_dir: PathLike,
    family: str,
    hint: str,
    dry_run: bool = False,
    write_files: Callable[[], list[str]] = list,
) -> ImportedWeights:
    """Writes a checkpoint with the parameters of another format, and its optimizer's state, if any; and `recipe.yaml`.

    Each tensor is read once, and copied into the arrays of pax one layer at a time. These are written from the memory
    that they are in: beyond the state itself, only a tensor is in memory.

    Args:
      source: The checkpoint.
      layout: How it holds the model.
      config: The recipe of the model.
      recipe: The same as YAML.
      shapes: Those of its training state.
      run_dir: A run without checkpoints.
      family: For the report.
      hint: What to do if the tensors are not those of the model.
      dry_run: Whether only to compare names and shapes.
      write_files: Writes other files of the run, before its checkpoint; returns the names of those carried over.

    Raises:
      DataError: The tensors are not those of the model; names each with both shapes. Or they are not finite.
      ConfigError: The run has checkpoints, or the optimizer keeps something that other formats do not.
      MissingError: The run cannot be written.
    """
    if CheckpointStore(RunDir(run_dir).checkpoints).steps():
        raise ConfigError(f"{run_dir} already has checkpoints.", "Give a new directory with `--out`.")
    state, params = named_leaves(shapes), named_leaves(shapes.params)
    parts: dict[Kind, dict[str, str]] = {"params": {name: f"params.{name}" for name in params}}
    if source.count is not None:
        for name, (kind, parameter) in arrays_per_parameter(state).items():
            parts.setdefault(kind, {})[parameter] = name
    else:
        _check_starts_at_zero(config, shapes)
    found = {kind: source.arrays(kind) for kind in parts}
    differences = {kind: compare_to_model(layout.only(names), params, found[kind]) for kind, names in parts.items()}
    different = next((kind for kind in parts if differences[kind]), None)
    tensors = [x for kind in found.values() for x in kind.values()]
    started = time.perf_counter()
    if different is not None and not (dry_run and different == "params"):
        what = "The tensors" if different == "params" else f"Those of the optimizer's `{different}`"
        raise DataError(f"{what} in {source.path} are not of this model: {differences[different].text()}.", hint)
    carried: list[str] = []
    if not dry_run:
        arrays: dict[str, Any] = {}
        for kind, names in parts.items():
            of_kind = {parameter: np.empty(state[name].shape, state[name].dtype) for parameter, name in names.items()}
            fill_pax(layout.only(names), source.reader(kind), of_kind, kind)
            if wrong := [name for name, x in of_kind.items() if not np.isfinite(x.sum(dtype=np.float32))]:
                raise DataError(f"{source.path} has NaN or infinity in {listing(wrong)}.", "Download it again.")
            arrays |= {names[parameter]: x for parameter, x in of_kind.items()}
        counts = {name: np.int32(source.count or 0) for name in state if name.endswith(".count")}
        RunDir(run_dir).create()
        carried = write_files()
        write_run(config, recipe, run_dir, shapes, arrays | counts, source.step)
    seconds = 0.0 if dry_run else time.perf_counter() - started
    path, run = os.fspath(source.path), os.fspath(run_dir)
    has_state, names = source.count is not None, differences["params"]
    count = sum(x.size for x in params.values())
    num_bytes = sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in tensors)
    return ImportedWeights(path, run, family, recipe, source.step, has_state, count, num_bytes, seconds, names, carried)


def _check_starts_at_zero(config: ExperimentConfig, shapes: TrainState) -> None:
    """Raises a ConfigError for an optimizer whose first state is not 0, apart from moving averages."""
    ones = jax.tree.map(lambda x: np.ones((1,) * x.ndim, x.dtype), shapes.params)
    weights = jax.tree.unflatten(jax.tree.structure(shapes.params), shapes.weights)
    state = fdl.build(with_derived_sizes(config, 1).task.train.learner).init(ones, weights)
    for name, x in named_leaves(state).items():
        if np.any(x) and not name.startswith("ema."):
            hint = "Import without it, and train from that run with `--from`."
            raise ConfigError(f"The first `{name}` of the recipe's optimizer is not 0.", hint)


def read_run(run_dir: PathLike, step: int, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint in host memory, by name in the state.

    Args:
      run_dir: The run.
      step: One of its steps.
      wanted: Name → shape.

    Raises:
      DataError: The checkpoint is damaged, or not of this recipe.
    """
    step_dir = CheckpointStore(epath.Path(run_dir) / "checkpoints").directory / str(step)
    manifest = read_manifest(step_dir)
    shapes = {name: entry.shape for name, entry in manifest.arrays.items()}
    if different := [name for name, x in wanted.items() if shapes.get(name) != tuple(x.shape)]:
        raise DataError(f"{step_dir} is not of this recipe: {listing(different)}.", "Use the run's own recipe.yaml.")
    return {name: np.asarray(x) for name, x in read_arrays(step_dir, manifest, wanted).items()}
