"""Starts a run from a Hugging Face directory, and writes a run's checkpoint as one."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

import fiddle as fdl
import ml_dtypes
import numpy as np
import yaml
from etils import epath

from paxcli.checkpoint.array_differences import ArrayDifferences
from paxcli.checkpoint.manager import CheckpointStore, format_steps
from paxcli.checkpoint.reading import listing, named_leaves, read_arrays, read_manifest
from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.config.paths import resolve_path
from paxcli.convert.huggingface.adapters import write_adapter
from paxcli.convert.huggingface.config import FAMILIES, MODEL, config_json, family_of, model_values
from paxcli.convert.huggingface.files import (
    CONFIG,
    Safetensors,
    read_json,
    refuse_pickles,
    write_json,
    write_safetensors,
)
from paxcli.convert.huggingface.layouts import huggingface_layout, saved_names, sizes_of
from paxcli.convert.huggingface.tokenizer import FOLDER, TOKENIZER, carry_files, input_values
from paxcli.convert.layout import Source, compare_to_model, fill_pax, foreign_shapes, from_pax
from paxcli.convert.new_run import check_new, state_shapes, write_run
from paxcli.errors import ConfigError, DataError, MissingError
from paxcli.layers.lora import adapted_weights, without_adapters
from paxcli.training.experiment import Experiment

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_TRAINING = {
    "task.train.percore_batch_size": 1,
    "task.train.num_train_steps": 1000,
    "task.train.learner.learning_rate": 1e-5,
    "task.train.learner.schedule.warmup_steps": 100,
}


@dataclasses.dataclass(frozen=True)
class ImportedWeights:
    """Weights that were imported, or would be.

    Attributes:
      source: Directory of the weights.
      run_dir: The new run.
      family: Its `model_type`.
      recipe: The recipe as YAML.
      parameters: The number of parameters.
      num_bytes: Size of the tensors that were read.
      seconds: Time that reading them took; 0 if nothing was written.
      tensors: Names that match, are missing, unexpected, or have another shape.
      carried: Names of the files that were copied.
    """

    source: str
    run_dir: str
    family: str
    recipe: str
    parameters: int
    num_bytes: int
    seconds: float
    tensors: ArrayDifferences
    carried: list[str]


@dataclasses.dataclass(frozen=True)
class ExportedWeights:
    """Weights that were exported.

    Attributes:
      run_dir: The run.
      step: The checkpoint's.
      directory: The new directory.
      family: The `model_type`.
      dtype: Of the tensors.
      parameters: The number of parameters.
      files: Names of the files.
    """

    run_dir: str
    step: int
    directory: str
    family: str
    dtype: str
    parameters: int
    files: list[str]


def import_huggingface(
    source: str | os.PathLike[str], run_dir: str | os.PathLike[str], dry_run: bool = False
) -> ImportedWeights:
    """Starts a run from a Hugging Face directory, at step 0.

    Args:
      source: A directory with `config.json` and safetensors files.
      run_dir: A run without checkpoints.
      dry_run: Whether only to compare names and shapes.

    Raises:
      DataError: A file is missing or damaged, or the tensors are not those of the model.
      ConfigError: Pax does not have the architecture, or the run has checkpoints.
      MissingError: The run cannot be written.
    """
    folder, target = resolve_path(source), resolve_path(run_dir) / FOLDER
    if not folder.is_dir():
        refuse_pickles(folder)
        raise DataError(f"There is no directory {folder}.", "Give a directory of Hugging Face's format.")
    check_new(run_dir)
    found = read_json(folder / CONFIG)
    family = family_of(found)
    tensors = Safetensors(folder)
    recipe = {
        "recipe": FAMILIES[family].recipe,
        "set": {
            "task.name": family,
            **{f"{MODEL}.{path}": value for path, value in model_values(found).items()},
            **_TRAINING,
            **input_values(folder, found, target / TOKENIZER),
        },
    }
    config = load(recipe["recipe"]).config
    for path, value in recipe["set"].items():
        assign(config, path, value)
    shapes = state_shapes(config)
    params = named_leaves(shapes.params)
    layout = huggingface_layout(family, sizes_of(config.task.model, family), list(params))
    names = saved_names(list(tensors.shapes), family, tied=config.task.model.head is None)
    present = {name: tensors.shapes[saved] for name, saved in names.items()}
    differences = compare_to_model(layout, params, present)
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    size = sum(x.size * x.dtype.itemsize for x in present.values())
    count, seconds, carried = sum(x.size for x in params.values()), 0.0, []
    if not dry_run:
        if differences:
            raise DataError(
                f"The tensors in {folder} are not those of its config.json: {differences.text()}.",
                "Use the config.json that belongs to the weights; `--dry-run` lists all names.",
            )
        started = time.perf_counter()
        arrays = {name: np.empty(x.shape, x.dtype) for name, x in params.items()}
        fill_pax(layout, _Renamed(tensors, names), arrays)
        seconds = time.perf_counter() - started
        write_run(config, text, run_dir, shapes, {f"params.{name}": x for name, x in arrays.items()})
        carried = [CONFIG, *carry_files(folder, target)]
        write_json(target / CONFIG, found)
    return ImportedWeights(str(folder), os.fspath(run_dir), family, text, count, size, seconds, differences, carried)


def export_huggingface(
    config: fdl.Config[Experiment],
    run_dir: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> ExportedWeights:
    """Writes a checkpoint's parameters as a Hugging Face directory, with adapters merged into them.

    Args:
      config: The run's recipe.
      run_dir: The run.
      directory: A new directory.
      step: The checkpoint; None = the latest.
      dtype: `float32`, `bfloat16` or `float16`; None = that of the imported weights, else float32.
      adapter: Whether to write only the adapters, as PEFT's files.

    Raises:
      ConfigError: No family computes what this model computes, the directory has a model, or there are no adapters.
      DataError: There is no such checkpoint, or it is damaged.
      MissingError: The directory cannot be written.
    """
    store, target = CheckpointStore(epath.Path(run_dir) / "checkpoints"), resolve_path(directory)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        problem = f"no checkpoint of step {step}" if steps else "no checkpoint"
        raise DataError(f"{os.fspath(run_dir)} has {problem}.", f"It has: {format_steps(steps)}.")
    step = steps[-1] if step is None else step
    if target.exists() and (not target.is_dir() or any(target.glob("*.safetensors")) or (target / CONFIG).exists()):
        raise ConfigError(f"{target} already has a model.", "Give a new directory with `--out`.")
    from_import = resolve_path(run_dir) / FOLDER
    carried = read_json(from_import / CONFIG) if (from_import / CONFIG).exists() else None
    dtype = dtype or _dtype_of(carried)
    if dtype not in DTYPES:
        raise ConfigError(f"`--dtype {dtype}` is unknown.", f"Use one of {', '.join(DTYPES)}.")
    content = config_json(config, carried, dtype)
    family = family_of(content)
    lora, state = fdl.build(config.task.model).lora, state_shapes(config)
    params = without_adapters(named_leaves(state.params))
    layout = huggingface_layout(family, sizes_of(config.task.model, family), list(params))
    arrays = _read_params(store.directory / str(step), named_leaves(state.params))
    adapted = adapted_weights(arrays, dict(zip(arrays, state.weights, strict=True)), lora)
    numpy_dtype = np.dtype(DTYPES[dtype])
    shapes = foreign_shapes(layout, params)
    sizes = {name: math.prod(x.shape) * numpy_dtype.itemsize for name, x in shapes.items()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        if adapter:
            files = write_adapter(target, lora, layout, adapted, numpy_dtype) + carry_files(from_import, target)
        else:
            merged = arrays | {name: np.asarray(weight.merge()) for name, weight in adapted.items()}
            written = ((name, x.astype(numpy_dtype)) for name, x in from_pax(layout, merged))
            files = [CONFIG, *write_safetensors(target, written, sizes), *carry_files(from_import, target)]
            write_json(target / CONFIG, content)
    except OSError as error:
        raise MissingError(f"{target} cannot be written: {error.strerror}.", "Choose another directory.") from error
    count = sum(x.size for x in params.values())
    return ExportedWeights(os.fspath(run_dir), step, str(target), family, dtype, count, files)


@dataclasses.dataclass(frozen=True)
class _Renamed:
    """Tensors by the names that `transformers` writes now."""

    tensors: Source
    names: dict[str, str]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[self.names[name]]


def _dtype_of(config: dict[str, Any] | None) -> str:
    return (config or {}).get("dtype", (config or {}).get("torch_dtype")) or "float32"


def _read_params(step_dir: Any, params: dict[str, Any]) -> dict[str, np.ndarray]:
    manifest = read_manifest(step_dir)
    wanted = {f"params.{name}": x for name, x in params.items()}
    different = [
        name
        for name, x in wanted.items()
        if name not in manifest.arrays or manifest.arrays[name].shape != tuple(x.shape)
    ]
    if different:
        raise DataError(f"{step_dir} is not of this recipe: {listing(different)}.", "Use the run's own recipe.yaml.")
    found = read_arrays(step_dir, manifest, wanted)
    return {name: np.asarray(found[f"params.{name}"]) for name in params}
