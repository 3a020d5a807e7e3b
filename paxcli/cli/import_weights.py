"""`pax import`: weights of other formats as a run."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, SetOption, directory_option
from paxcli.cli.output import say_result
from paxcli.cli.runs import load_recipe
from paxcli.errors import ConfigError, DataError

if TYPE_CHECKING:
    from paxcli.checkpoint.array_differences import ArrayDifferences
    from paxcli.convert.runs import ImportedWeights

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
