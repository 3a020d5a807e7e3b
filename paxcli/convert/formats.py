"""Imports a checkpoint in the format that it has, and exports a run in another."""

from __future__ import annotations

from typing import Literal

from etils import epath

from paxcli.config.paths import resolve_path
from paxcli.convert.huggingface.files import CONFIG, GGUF, PICKLES
from paxcli.convert.huggingface.weights import export_huggingface, import_huggingface
from paxcli.convert.maxtext.checkpoint_files import find_maxtext
from paxcli.convert.maxtext.weights import export_maxtext, import_maxtext
from paxcli.convert.paxml import find_paxml, import_paxml
from paxcli.convert.runs import ExperimentConfig, ExportedWeights, ImportedWeights, PathLike, Recipe
from paxcli.errors import ConfigError, DataError
from paxcli.training.tokenizer_copies import check_tokenizers

Format = Literal["hf", "paxml", "maxtext"]

_WEIGHTS = (".safetensors", GGUF, *PICKLES)
_RECIPE_OF = {
    "paxml": "Give the recipe that it was trained with: `--recipe C4Spmd1BAdam4Replicas`.",
    "maxtext": "Convert its launch: `pax maxtext-convert SCRIPT --out recipe.yaml`; then give `--recipe recipe.yaml`.",
}


def format_of(source: PathLike) -> Format:
    """The format of a checkpoint, by its files.

    Raises:
      DataError: It is of no format that pax imports.
    """
    folder = epath.Path(resolve_path(source))
    if not folder.is_dir() or any(path.name == CONFIG or path.suffix in _WEIGHTS for path in folder.iterdir()):
        return "hf"
    if find_paxml(folder) is not None:
        return "paxml"
    if find_maxtext(folder) is not None:
        return "maxtext"
    if (folder / "recipe.yaml").exists():
        raise DataError(f"{source} is a run of pax.", f"To start from its weights: `pax train RECIPE --from {source}`.")
    formats = "Hugging Face (config.json, safetensors files), paxml (checkpoint_00001000) or MaxText (…/0/items)"
    raise DataError(f"{source} holds no checkpoint that pax knows.", f"Give a directory of {formats}.")


def import_weights(
    source: PathLike,
    run_dir: PathLike,
    format: Format | None,
    recipe: Recipe | None,
    dry_run: bool,
    adapter: PathLike | None,
) -> ImportedWeights:
    """Starts a run from a checkpoint.

    Args:
      source: Its directory.
      run_dir: A run without checkpoints.
      format: Its format; None = by its files.
      recipe: Name, config and YAML of a recipe of the same model; None = made from `config.json` (Hugging Face only).
      dry_run: Whether only to compare names and shapes.
      adapter: An adapter of PEFT to merge into weights of Hugging Face.

    Raises:
      ConfigError: The format needs a recipe; pax does not have the architecture; or the run has checkpoints.
      DataError: A file is missing or damaged, or the tensors are not those of the model.
      MissingError: The run cannot be written.
    """
    format = format or format_of(source)
    if format == "hf":
        return import_huggingface(source, run_dir, recipe, dry_run, adapter)
    if adapter is not None:
        raise ConfigError(f"{source} is of {format}, and adapters are of Hugging Face.", "Leave `--adapter` out.")
    if recipe is None:
        raise ConfigError(f"{source} does not describe its model.", _RECIPE_OF[format])
    name, config, text = recipe
    if format == "paxml":
        return import_paxml(config, text, name, source, run_dir, dry_run)
    return import_maxtext(config, text, source, run_dir, dry_run)


def export_weights(
    config: ExperimentConfig,
    run_dir: PathLike,
    directory: PathLike,
    format: Literal["hf", "maxtext"] = "hf",
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    dry_run: bool = False,
) -> ExportedWeights:
    """Writes a run's checkpoint for other tools.

    Args:
      config: The run's recipe.
      run_dir: The run.
      directory: A new directory.
      format: Hugging Face's, or MaxText's with the optimizer's state.
      step: The checkpoint; None = the latest.
      dtype: Of Hugging Face's tensors; None = that of the imported weights, else float32.
      adapter: Whether to write only the adapters, as PEFT's files.
      dry_run: Whether to write nothing.

    Raises:
      ConfigError: The format has nothing that computes what this model computes, or the directory has a model.
      DataError: There is no such checkpoint, or it is damaged; or a tokenizer file changed since the run started.
      MissingError: The directory cannot be written.
    """
    check_tokenizers(config, epath.Path(resolve_path(run_dir)))
    if format == "hf":
        return export_huggingface(config, run_dir, directory, step, dtype, adapter, dry_run)
    if adapter or config.task.model.lora is not None:
        raise ConfigError("A run with adapters cannot be exported in MaxText's format.", "Use `--format hf`.")
    if dtype is not None:
        raise ConfigError("MaxText's checkpoints have the dtypes of the run.", "Leave out `--dtype`.")
    return export_maxtext(config, run_dir, directory, step, dry_run)
