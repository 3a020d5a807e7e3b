"""`pax export`: a run's weights for other tools."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Literal

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, StepOption, directory_option
from paxcli.cli.output import say_result


def export_weights(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    out: Annotated[str, directory_option("The new directory. Required.")],
    format: Annotated[Literal["hf", "maxtext"], typer.Option(help="hf: Hugging Face. Default: hf.")] = "hf",
    step: StepOption = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="With hf: dtype of the tensors. Default: that of the imported, or float32."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters, as PEFT's files. Default: merge them.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint for Hugging Face or MaxText.

    Hugging Face gets parameters, config.json and tokenizer. MaxText gets the training state.

    \b
    Examples:
      pax export runs/llama --out llama-mine
      pax export runs/llama --out llama-mine --step 500 --dtype bfloat16
      pax export runs/llama --format maxtext --out gs://mine/llama
      pax export runs/llama-lora --out llama-adapter --adapter
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # weights pass through host memory only
    done = pax.export_weights(run_dir, out, step, dtype, format, adapter, dry_run)
    what = "the adapters" if adapter else f"{done.parameters:,} parameters"
    what += " and the optimizer's state" if done.with_optimizer else ""
    what += f", without {', '.join(done.left_out)}," if done.left_out else ""
    what += f" of step {done.step} as {done.family} in {done.dtype} to {done.directory}."
    say_result(dataclasses.asdict(done), f"{'Would write' if dry_run else 'Wrote'} {what}", as_json)
