"""`pax import`: published weights as a run."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption
from paxcli.cli.output import say_result

if TYPE_CHECKING:
    from paxcli.convert.huggingface.weights import ImportedWeights

FormatOption = Annotated[Literal["hf"], typer.Option("--format", help="The format: Hugging Face.")]


def import_weights(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A directory with config.json and safetensors files.")],
    out: Annotated[str, typer.Option("--out", metavar="RUN_DIR", help="The new run. Required.")],
    format: FormatOption = "hf",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a run from published weights: writes a checkpoint, the tokenizer and a recipe that trains them.

    \b
    Examples:
      pax import Llama-3.1-8B --out runs/llama
      pax import Llama-3.1-8B --out runs/llama --dry-run
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # weights pass through host memory only
    done = pax.import_weights(source, out, dry_run)
    say_result(dataclasses.asdict(done), _text(done, dry_run), as_json)


def _text(done: ImportedWeights, dry_run: bool) -> str:
    size = f"{done.parameters:,} parameters of {done.family} from {done.source}"
    if not dry_run:
        rate = done.num_bytes / 1e9 / max(done.seconds, 1e-9)
        speed = f"{done.num_bytes / 1e9:.2f} GB, {rate:.2f} GB/s"
        return f"Imported {size}: {speed}.\nTo train: pax train {done.run_dir}"
    found = done.tensors
    lines = [f"Would import {size}." if not found else "Cannot import: the tensors are not those of config.json."]
    lines.append(f"matched: {len(found.matched)}")
    for title, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        lines += [f"{title}: {len(names)}", *(f"  {name}" for name in names)]
    lines += [f"mismatched: {len(found.mismatched)}", *(f"  {text}" for text in found.mismatched.values())]
    return "\n".join(lines)
