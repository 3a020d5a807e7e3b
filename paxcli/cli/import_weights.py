"""`pax import`: weights of other formats as a run."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, SetOption, directory_option
from paxcli.cli.output import say_result
from paxcli.cli.runs import Words, load_recipe, retype_changes
from paxcli.errors import ConfigError, DataError, MissingError

if TYPE_CHECKING:
    from paxcli.checkpoint.array_differences import ArrayDifferences
    from paxcli.convert.runs import ImportedWeights

# Prefix of a Hugging Face directory, or of a model on the hub, where a run or a recipe may be named.
HF = "hf:"

_SOURCE = "Weights of Hugging Face, a model on the hub, or a checkpoint."


def import_weights(
    source: Annotated[str, typer.Argument(metavar="DIR|ORGANIZATION/NAME", help=_SOURCE)],
    out: Annotated[str, directory_option("The new run. Required.", "RUN_DIR")],
    format: Annotated[
        Literal["hf", "paxml", "maxtext"] | None,
        typer.Option(help="hf: Hugging Face. Default: inferred from the files."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="A recipe of the same model. Default: made from config.json (hf)."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="DIR|ORGANIZATION/NAME", help="LoRA or DoRA of PEFT to merge into the weights (hf)."),
    ] = None,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run from another tool's weights or checkpoint. Reads those of Hugging Face, paxml and MaxText.

    \b
    Examples:
      pax import Llama-3.1-8B --out runs/llama
      pax import Qwen/Qwen3-0.6B --out runs/qwen
      pax import Llama-3.1-8B --adapter my-lora --out runs/merged
      pax import gs://mine/c4/checkpoints --recipe C4Spmd1BAdam4Replicas --out runs/c4
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # weights pass through host memory only
    if recipe is None and (sets or overlays):
        raise ConfigError("`--set` and `--overlay` change a recipe, and none is given.", "Give it with `--recipe`.")
    loaded = None if recipe is None else load_recipe(recipe, overlays, sets)
    done = pax.import_weights(source, out, dry_run, loaded, format, adapter)
    if dry_run and done.tensors:
        error = DataError(f"Cannot import: the tensors are not those of {done.family}.", "See the names above.")
        say_result(dataclasses.asdict(done), _names_text(done.tensors), as_json, error)
    say_result(dataclasses.asdict(done), _text(done, dry_run), as_json)


def import_once(
    source: str, run_dir: str, recipe: str | None, overlays: Words, sets: Words, dry_run: bool, as_json: bool
) -> pax.Recipe:
    """Imports `hf:DIR` into a run that has no checkpoint, in a process of its own: this one's devices are for training.

    Args:
      source: What to import.
      run_dir: The run.
      recipe: The recipe of the model; None = the import makes one.
      overlays: Those of the training; what does not fit the recipe is found before the import.
      sets: The same.
      dry_run: Whether only to print what would happen.
      as_json: Whether to print a failure as JSON.

    Returns:
      The recipe to train: `recipe`, or the one that the import wrote, or would write, without what training changed in
      it; with the overlays and sets.

    Raises:
      ConfigError: The run began with other weights, or an overlay or value does not fit the recipe.
      MissingError: The import was killed.
    """
    from paxcli.checkpoint.manager import CheckpointStore
    from paxcli.training.run_dir import EARLIER_RECIPE, RunDir
    from paxcli.training.start_from import ORIGIN, SOURCE

    run, name = RunDir(run_dir), source.removeprefix(HF)
    first, record = run.path / EARLIER_RECIPE.format(1), run.path / ORIGIN / SOURCE
    if CheckpointStore(run.checkpoints).steps():
        began = record.read_text() if record.exists() else "other parameters"
        if began not in (name, os.path.abspath(name)):
            hint = f"`pax train {shlex.quote(run_dir)}` resumes it; to start a new run, give another `--run-dir`."
            raise ConfigError(f"The run {run_dir} began with {began}, not with {name}.", hint)
        return load_recipe(recipe or (str(first) if first.exists() else run_dir), overlays, sets)
    command = [sys.executable, "-m", "paxcli", "import", name, "--format", "hf", "--out", run_dir]
    if recipe is not None:
        command += ["--recipe", recipe, *retype_changes(overlays, sets)]
    loaded = _recipe_of(name, overlays, sets) if recipe is None else load_recipe(recipe, overlays, sets)
    loaded.validate()
    command += [*(["--dry-run"] if dry_run else []), *(["--json"] if as_json else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode < 0:
        raise MissingError(f"The import was killed by signal {-done.returncode}.", "Memory may have run out.")
    summary = f"{'Would import' if dry_run else 'Imported'} {name} into {run_dir}.\n"
    text = summary if as_json and not done.returncode else done.stdout  # one JSON object is printed
    print(text, end="", file=sys.stdout if as_json and done.returncode else sys.stderr)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return loaded if dry_run or recipe is not None else load_recipe(run_dir, overlays, sets)


def _recipe_of(source: str, overlays: Words, sets: Words) -> pax.Recipe:
    """The recipe that an import would make, with the tokenizer of the source."""
    from paxcli.convert.huggingface.weights import recipe_of

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(recipe_of(source))
        file.flush()
        return load_recipe(file.name, overlays, sets)


def _text(done: ImportedWeights, dry_run: bool) -> str:
    state = f", with the optimizer's state of step {done.step}" if done.with_optimizer else ""
    size = f"{done.parameters:,} parameters of {done.family}{state}, from {done.source}"
    if done.left_out:
        size += f", without {', '.join(done.left_out)}"
    if dry_run:
        return f"Would import {size}.\n{_names_text(done.tensors)}"
    gigabytes = done.num_bytes / 1e9
    lines = [f"Imported {size}: {gigabytes:.2f} GB, {gigabytes / max(done.seconds, 1e-9):.2f} GB/s."]
    if done.not_imported:
        lines.append(f"Settings of generation that pax does not have: {', '.join(done.not_imported)}.")
    if done.carried and "tokenizer.json" not in done.carried:
        lines.append("It has no tokenizer.json: set `tokenizer` to train on text.")
    return "\n".join([*lines, f"To train: pax train {done.run_dir}"])


def _names_text(found: ArrayDifferences) -> str:
    lines = [f"matched: {len(found.matched)}"]
    for title, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        lines += [f"{title}: {len(names)}", *(f"  {name}" for name in names)]
    lines += [f"mismatched: {len(found.mismatched)}", *(f"  {text}" for text in found.mismatched.values())]
    return "\n".join(lines)
