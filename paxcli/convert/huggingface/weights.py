"""Starts a run from a Hugging Face directory, and writes a run's checkpoint as one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import fiddle as fdl
import numpy as np
import yaml
from etils import epath
from safetensors import SafetensorError

from paxcli.checkpoint.array_differences import ArrayType
from paxcli.checkpoint.manager import find_step
from paxcli.checkpoint.reading import named_leaves
from paxcli.config.paths import replace_text, resolve_path
from paxcli.convert import runs
from paxcli.convert.huggingface.adapters import ADAPTER_CONFIG, MergedTensors, write_adapter
from paxcli.convert.huggingface.config import FAMILIES, MODEL, config_json, differing_fields, model_values, text_decoder
from paxcli.convert.huggingface.files import CONFIG, Safetensors, read_json, write_json, write_safetensors
from paxcli.convert.huggingface.generation import GENERATION, decoding_values, generation_json
from paxcli.convert.huggingface.layouts import TIED, huggingface_layout, modules_left_out, saved_names, text_names
from paxcli.convert.huggingface.tokenizer import TOKENIZER, carry_files, eos_id, input_values
from paxcli.convert.layout import Kind, Source, foreign_shapes, from_pax
from paxcli.convert.runs import ExperimentConfig, ExportedWeights, ImportedWeights, PathLike, Recipe
from paxcli.errors import ConfigError, DataError, MissingError, first_line
from paxcli.inputs.hub import find_model
from paxcli.layers.lora import adapted_weights, without_adapters
from paxcli.training.experiment import with_derived_sizes
from paxcli.training.session import state_shapes
from paxcli.training.start_from import ORIGIN, SOURCE
from paxcli.training.tokenizer_copies import copied_folders, with_copied_tokenizers

DTYPES = ("float32", "bfloat16", "float16")
_OF_TENSORS = "dtypes.json"  # in a run: name of each imported tensor -> its dtype
_UNFINISHED = ".pax-export"  # in a directory of Hugging Face: files of an export, until all are written


def import_huggingface(
    source: PathLike, run_dir: PathLike, recipe: Recipe | None, dry_run: bool, adapter: PathLike | None
) -> ImportedWeights:
    """Starts a run from a Hugging Face directory, at step 0.

    Args:
      source: A directory with `config.json` and safetensors files, or the name of a model on the Hugging Face Hub. Of a
        multimodal model, the text decoder is imported.
      run_dir: A run without checkpoints.
      recipe: Name, config and YAML of a recipe of the same model; None = made from `config.json`.
      dry_run: Whether only to compare names and shapes.
      adapter: A directory with a LoRA or DoRA adapter of PEFT, or its name on the hub, to merge into the weights.

    Raises:
      DataError: A file is missing or damaged, or the tensors are not those of the model.
      ConfigError: Pax does not have the architecture, the recipe or adapter has another, or the run has checkpoints.
      MissingError: The run cannot be written, or the hub does not let this user read the model.
      RemoteError: The hub cannot be reached.
    """
    folder, target = resolve_path(find_model(source)), resolve_path(run_dir) / ORIGIN
    if (folder / ADAPTER_CONFIG).exists():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE"
        hint = f"Import its base with it: `pax import {base} --adapter {source} --out …`."
        raise ConfigError(f"{folder} has an adapter of PEFT, not a model.", hint)
    content = read_json(folder / CONFIG)
    family, found = text_decoder(content)
    if adapter is not None:
        adapter = resolve_path(find_model(adapter, commit=Path(find_model(adapter)).name))
    # A fine-tuned model may have a chat template or tokens of its own.
    with_tokenizer = adapter if adapter is not None and (adapter / TOKENIZER).is_file() else folder
    file = folder / GENERATION
    decoding, not_imported = decoding_values(read_json(file) if file.exists() else found)
    name, config, text = recipe or _new_recipe(with_tokenizer, found, family, target, decoding)
    if differences := differing_fields(config, found):
        problem = f"The recipe {name} is not of the model in {folder}: {'; '.join(differences[:5])}."
        raise ConfigError(problem, "Choose the recipe of this model, or leave it out: pax makes one from config.json.")
    config = copy.deepcopy(config)
    model, is_multimodal = config.task.model, found is not content
    model.lora = model.dpo = None  # what they add is new when training starts from the weights
    shapes = state_shapes(config)
    layout = huggingface_layout(family, model, named_leaves(shapes.params))
    base = Safetensors(resolve_path(find_model(source, folder.name)))
    tensors = base if adapter is None else MergedTensors(base, adapter, is_multimodal)
    named = text_names(tensors.shapes, is_multimodal)
    left_out = sorted(modules_left_out(tensors.shapes, named))
    tied = [named[name] for name in TIED if model.head is None and name in named]
    if len(tied) == 2 and not np.array_equal(tensors[tied[0]], tensors[tied[1]]):
        hint = "If it is the model's output projection, set `tie_word_embeddings` to false in config.json."
        other = "the file has another" if adapter is None else f"the adapter in {adapter} changes one of them"
        raise DataError(f"{folder}: config.json ties `{tied[1]}` to `{tied[0]}`, and {other}.", hint)
    nonempty = [name for name, saved in named.items() if tensors.shapes[saved].size]
    names = saved_names(nonempty, family, model.head is None, model.num_layers)
    hint = "Use the config.json that belongs to the weights; `--dry-run` lists all names."
    checkpoint = _Checkpoint(folder, tensors, {name: named[saved] for name, saved in names.items()})

    def write_files() -> list[str]:
        carried = [name for one in (folder, with_tokenizer) for name in carry_files(one, target)]
        write_json(target / CONFIG, found)
        dtypes = {name: x.dtype.name for name, x in checkpoint.arrays().items() if x.dtype.name in DTYPES}
        write_json(target / _OF_TENSORS, dtypes)
        replace_text(target / SOURCE, os.path.abspath(source) if os.path.exists(source) else os.fspath(source))
        return [*dict.fromkeys((CONFIG, *carried))]

    done = runs.import_checkpoint(checkpoint, layout, config, text, shapes, run_dir, family, hint, dry_run, write_files)
    not_imported = not_imported if recipe is None and file.exists() else []
    return dataclasses.replace(done, not_imported=not_imported, left_out=left_out)


def recipe_of(source: PathLike) -> str:
    """The recipe that an import would make, as YAML, with the source's tokenizer and without values for decoding.

    Reads no weights, starts no devices.

    Raises:
      DataError: A file is missing or damaged.
      ConfigError: Pax does not have the architecture.
      MissingError: The hub does not let this user read the model.
      RemoteError: The hub cannot be reached.
    """
    folder = resolve_path(find_model(source))
    family, found = text_decoder(read_json(folder / CONFIG))
    return _new_recipe(folder, found, family, folder, {})[2]


def _new_recipe(folder: Path, found: dict[str, Any], family: str, target: Path, decoding: dict[str, Any]) -> Recipe:
    """A recipe that trains the model: its family, config and YAML."""
    values = {
        "task.name": family,
        **{f"{MODEL}.{path}": value for path, value in model_values(found).items()},
        **FAMILIES[family].training,
        **input_values(folder, target / TOKENIZER),
        **{f"decoding.{field}": value for field, value in decoding.items()},
    }
    base = FAMILIES[family].recipe
    config = runs.recipe_with(base, values)
    return family, config, yaml.safe_dump({"recipe": base, "set": values}, sort_keys=False, allow_unicode=True)


def export_huggingface(
    config: ExperimentConfig,
    run_dir: PathLike,
    directory: PathLike,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    dry_run: bool = False,
) -> ExportedWeights:
    """Writes a checkpoint's parameters as a Hugging Face directory, with adapters merged into them.

    They are those that evaluation uses: the moving averages, if the recipe keeps them.

    Args:
      config: The run's recipe.
      run_dir: The run.
      directory: A new directory.
      step: The checkpoint; None = the latest.
      dtype: `float32`, `bfloat16` or `float16`; None = that of each imported tensor, else float32.
      adapter: Whether to write only the adapters, as PEFT's files.
      dry_run: Whether to write nothing.

    Raises:
      ConfigError: No family computes what this model computes, the directory has a model, or there are no adapters.
      DataError: There is no such checkpoint, it is damaged, or a value is too large for the dtype.
      MissingError: The directory cannot be written.
    """
    target, step = resolve_path(directory), find_step(run_dir, step)
    if target.exists() and (not target.is_dir() or any(target.glob("*.safetensors")) or (target / CONFIG).exists()):
        raise ConfigError(f"{target} already has a model.", "Give a new directory with `--out`.")
    origin, copies = resolve_path(run_dir) / ORIGIN, copied_folders(config, epath.Path(run_dir))
    files = (origin / name for name in (CONFIG, _OF_TENSORS, GENERATION))
    carried, of_tensors, old_generation = (read_json(file) if file.exists() else {} for file in files)
    of_tensors = {} if dtype else of_tensors
    counted = collections.Counter(of_tensors.values()).most_common(1)
    dtype = dtype or (counted[0][0] if counted else carried.get("dtype") or carried.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"`--dtype {dtype}` is unknown.", f"Use one of {', '.join(DTYPES)}.")
    content = config_json(config, carried or None, dtype)
    if not carried and (end := eos_id(with_copied_tokenizers(config, epath.Path(run_dir)))) is not None:
        content["eos_token_id"] = end  # otherwise transformers uses the default of its config class
    family = content["model_type"]
    lora, state = fdl.build(config.task.model).lora, state_shapes(config)
    if adapter and lora is None:
        raise ConfigError("The run has no adapters.", "Leave `--adapter` out.")
    stored = named_leaves(state.params)
    own = without_adapters(stored)
    params = {name: x for name, x in own.items() if not name.startswith("mtp_")}
    left_out = sorted({name.partition(".")[0] for name in own.keys() - params.keys()})
    if adapter:
        learner = fdl.build(with_derived_sizes(config, 1).task.train.learner)
        if others := sorted(named_leaves(learner.select_trained(state.params)).keys() & params.keys()):
            hint = "Export the merged weights: leave `--adapter` out."
            raise ConfigError(f"The run trains `{others[0]}` too, which the files of an adapter do not hold.", hint)
    layout = huggingface_layout(family, config.task.model, params)
    known = named_leaves(state)
    saved = {name: average if (average := f"opt_state.ema.{name}") in known else f"params.{name}" for name in stored}
    arrays = runs.read_run(run_dir, step, {saved[name]: x for name, x in stored.items()})
    arrays = {name: arrays[saved[name]] for name in stored}
    adapted = adapted_weights(arrays, dict(zip(stored, state.weights, strict=True)), lora)
    count = sum(x.size for x in params.values())
    done = ExportedWeights(os.fspath(run_dir), step, str(target), family, dtype, False, count, [], left_out)
    if dry_run:
        return done
    foreign = foreign_shapes(layout, params)
    dtypes = {name: np.dtype(of_tensors.get(name, dtype)) for name in foreign}
    sizes = {name: math.prod(x.shape) * dtypes[name].itemsize for name, x in foreign.items()}
    unfinished = target / _UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
        unfinished.mkdir(parents=True)
        if adapter:
            files = write_adapter(unfinished, lora, layout, adapted, np.dtype(dtype))
        else:
            merged = arrays | {name: np.asarray(weight.merge()) for name, weight in adapted.items()}
            written = ((name, _cast(name, x, dtypes[name])) for name, x in from_pax(layout, merged))
            files = [CONFIG, *write_safetensors(unfinished, written, sizes)]
            write_json(unfinished / CONFIG, content)
        for folder in (origin, *map(resolve_path, copies[:1])):  # the tokenizer of training replaces the imported one
            files += carry_files(folder, unfinished)
        if not adapter and (generation := generation_json(config, old_generation)) is not None:
            write_json(unfinished / GENERATION, generation)
            files.append(GENERATION)
        files = [*dict.fromkeys(files)]
        for name in reversed(files):  # config.json is the last: it makes the directory a model
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copymode(unfinished / files[0], unfinished / name)  # safetensors writes files for this user only
            (unfinished / name).replace(target / name)
    except (OSError, SafetensorError) as error:
        raise MissingError(f"{target} cannot be written: {first_line(error)}.", "Choose another directory.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return dataclasses.replace(done, files=files)


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = array.astype(dtype, copy=False)
    if not np.isfinite(found).all() and np.isfinite(array).all():
        raise DataError(f"`{name}` has values beyond {dtype}.", "Export with `--dtype bfloat16` or `float32`.")
    return found


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """Parameters by the names that `transformers` writes now: a `ForeignCheckpoint`."""

    path: Path
    tensors: Safetensors | MergedTensors
    names: dict[str, str]
    step: int = 0
    count: None = None

    def arrays(self, kind: Kind = "params") -> dict[str, ArrayType]:
        return {name: self.tensors.shapes[saved] for name, saved in self.names.items()}

    def reader(self, kind: Kind = "params") -> Source:
        return self

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[self.names[name]]
