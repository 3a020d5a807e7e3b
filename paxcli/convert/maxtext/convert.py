"""Converts the launches of a MaxText script to recipes, and describes them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paxcli.config.assign import assign
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, LaunchFile, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.render import printable, recipe_python, recipe_yaml, report
from paxcli.convert.maxtext.sizes import flops, num_parameters
from paxcli.convert.maxtext.source import read_source
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError
from paxcli.training.experiment import summarize
from paxcli.training.validate import validate


def convert_script(
    words: Sequence[str],
    *,
    model: str | None = None,
    arguments: Mapping[str, str] | None = None,
    date: datetime.date | None = None,
    topology: str | None = None,
    slices: int | None = None,
) -> tuple[list[Conversion], LaunchFile]:
    """A conversion for each launch of a script, and what was read.

    Args:
      words: A file, or `key=value` words.
      model: The name of a MaxText model, in place of `words`.
      arguments: Variables and positional arguments of the script.
      date: The day whose default values apply; None = inferred.
      topology: One slice, such as `v4-128`; None = inferred.
      slices: How many; None = inferred.

    Raises:
      ConfigError: There is nothing to read, no launch in it, or no recipe for it.
    """
    if bool(words) == (model is not None):
        raise ConfigError("Give one of: a script, keys, `--model`.", "For example `pax maxtext-convert run.sh`.")
    if arguments and len(words) != 1:
        raise ConfigError("Only a script has variables, which `--arg` sets.", "Give the keys as `key=value`.")
    if model is not None:
        file, name = LaunchFile([Launch(1, pairs=[Pair("model_name", model, 1)])]), model
    else:
        file = read_source(words, arguments)
        name = Path(words[0]).name if len(words) == 1 and "=" not in words[0] else "maxtext"
    names = [name, *(f"{name}, line {launch.line}" for launch in file.launches[1:])]
    return [
        convert(launch, named, date=date, topology=topology, slices=slices)
        for launch, named in zip(file.launches, names, strict=False)
    ], file


def describe(
    conversion: Conversion, file: LaunchFile, python: bool = False, check: bool = False, verbose: bool = False
) -> dict[str, Any]:
    """The recipe, its sizes, and a report.

    Args:
      conversion: A launch as a recipe.
      file: What the launch was read from.
      python: Whether to write a Python recipe instead of YAML.
      verbose: Whether the report lists all values.
      check: Whether to validate the recipe, and compare its FLOPs with those of MaxText's formula.

    Raises:
      ConfigError: The recipe is not valid.
    """
    config = recipe_with(BASE_RECIPE, conversion.values)
    assign(config, "train_input", "SyntheticInput")  # sizes do not depend on the data, which may not exist here
    config.eval_inputs = []
    config.task.model.dpo = None  # which needs pairs, and a copy of the parameters
    if check:
        validate(config)
    sizes, theirs = summarize(config), flops(conversion.settings)
    text = report(conversion, sizes["parameters"], verbose)
    skipped = [f"line {found.line}: {found.text[:80]}: {found.reason}" for found in (*file.skipped, *file.others)]
    text += "".join(["\n\nSkipped:", *(f"\n  {printable(line)}" for line in skipped)]) if skipped else ""
    result = {
        "recipe": recipe_python(conversion) if python else recipe_yaml(conversion),
        "parameters": sizes["parameters"],
        "maxtext_parameters": num_parameters(conversion.settings),
        "tokens_per_step": conversion.tokens_per_step,
        "num_devices": conversion.num_devices,
        "date": str(conversion.settings.date),
        "maxtext_tflops_per_device": theirs.total,
        "flops_formula": theirs.formula,
        "table": [dataclasses.asdict(row) for row in conversion.rows],
        "dropped": [dataclasses.asdict(dropped) for dropped in conversion.settings.dropped],
        "approximated": conversion.approximated,
        "undecided": conversion.settings.undecided,
        "warnings": conversion.settings.warnings,
        "skipped": skipped,
    }
    if check and sizes["flops_per_step"]:
        tflops = sizes["flops_per_step"] / sizes["num_devices"] / 1e12
        result["tflops_per_device"] = tflops
        counted = f"{tflops:,.2f} TFLOPs per step and device, {tflops / theirs.total - 1:+.2%} of MaxText's formula"
        text += f"\n\nChecked: pax counts {counted}."
    return result | {"report": text}
