"""`pax export`: a run's weights for other tools."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Literal

import typer

import paxcli as pax
from paxcli.cli.import_weights import FormatOption
from paxcli.cli.options import JsonOption, StepOption
from paxcli.cli.output import say_result


def export_weights(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The new directory. Required.")],
    format: FormatOption = "hf",
    step: StepOption = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Dtype of the tensors. Default: that of the imported weights, or float32."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters, as PEFT's files. Default: merge them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's parameters as config.json and safetensors files, with the imported tokenizer.

    \b
    Examples:
      pax export runs/llama --out llama-mine
      pax export runs/llama --out llama-mine --step 500 --dtype bfloat16
      pax export runs/llama-lora --out llama-adapter --adapter
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # weights pass through host memory only
    done = pax.export_weights(run_dir, out, step, dtype, adapter)
    size = f"{'the adapters' if adapter else f'{done.parameters:,} parameters'} of step {done.step}"
    say_result(dataclasses.asdict(done), f"Wrote {size} as {done.family} in {done.dtype} to {done.directory}.", as_json)
