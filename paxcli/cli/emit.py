"""`pax provision emit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paxcli.cli.install import FromOption
from paxcli.cli.options import JsonOption, OverlayOption, RecipeArgument, RunDirOption, SetOption, file_option
from paxcli.cli.output import say_result
from paxcli.cli.runs import check_devices, load_recipe, retype_changes
from paxcli.config.paths import write_output
from paxcli.errors import ConfigError
from paxcli.log import log

TargetOption = Annotated[
    Literal["gke", "slurm", "skypilot", "image"],
    typer.Option(help="The scheduler; image: a Dockerfile with this checkout."),
]
MachineOption = Annotated[
    str, typer.Option(metavar="TYPE", help="A TPU slice such as v4-128, or a machine's GPUs: h100:8.")
]
CountOption = Annotated[int, typer.Option(min=1, max=1024, help="How many TPU slices or machines.")]
JobNameOption = Annotated[str | None, typer.Option(help="The job's name. Default: the recipe's.")]
ImageOption = Annotated[str | None, typer.Option(help="The container image, for gke and image. Default: none.")]
OutOption = Annotated[Path | None, file_option("Write to a file. Default: print.")]


def emit(
    recipe: RecipeArgument,
    target: TargetOption,
    accelerator: MachineOption,
    slices: CountOption = 1,
    name: JobNameOption = None,
    image: ImageOption = None,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    source: FromOption = "local",
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a job that trains a recipe, and run nothing. Formats: GKE JobSet, Slurm script, SkyPilot task, Dockerfile.

    \b
    Examples:
      pax provision emit c4-1b --target slurm --accelerator h100:4 --run-dir /shared/c4-1b
      pax provision emit tiny --target skypilot --accelerator h100:8 --out tiny.yaml
    """
    from paxcli.cloud.emit import TARGETS, Gpus, Task, find_machine, job_name
    from paxcli.config.overlay import YAML_SUFFIXES
    from paxcli.training.validate import validate

    resolved = load_recipe(recipe, overlays, sets)
    words = ["pax", "train", *retype_changes(overlays, sets)]
    words += [f"--run-dir={run_dir}"] if run_dir else []
    for option, given, targets in (("--image", image, ("gke", "image")), ("--from", source != "local", ("skypilot",))):
        if given and target not in targets:
            raise ConfigError(f"{option} has no effect with --target {target}.", "Leave it out.")
    machine = find_machine(accelerator)
    task = Task(name or job_name(resolved.name), [*words, "--", recipe], machine, slices, image, run_dir, source)
    text = TARGETS[target](task)
    in_slices = None if isinstance(machine, Gpus) else slices
    has = f"{slices} x {accelerator} has {task.devices}"
    check_devices(resolved, task.devices, in_slices, has, "Change --slices or --accelerator")
    validate(resolved.config, task.devices, reads_data=False)
    for file in (recipe, *(overlays or ())) if target != "slurm" else ():
        if Path(file.partition(":")[0]).suffix in (".py", *YAML_SUFFIXES):
            log.warning("The job reads %s: it has to be in the image, or in the directory of the task.", file)
    if out is not None:
        write_output(out, text.encode())
    result = {"target": target, "devices": task.devices, "path": out and str(out), "text": text}
    say_result(result, f"Wrote {out}" if out else text.rstrip("\n"), as_json)
