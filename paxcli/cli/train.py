"""`pax train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, RecipeArgument, RunDirOption, SetOption
from paxcli.cli.output import say_result
from paxcli.cli.runs import default_run_dir
from paxcli.cli.startup import configure_jax, restart_tuned

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="RUN_DIR[@STEP]", help="Take a new run's parameters from another run. Default: start fresh."
    ),
]
WithOptimizerOption = Annotated[
    bool, typer.Option("--with-optimizer", help="With --from: its optimizer state and step too. Default: parameters.")
]
AllowChangedOption = Annotated[
    bool,
    typer.Option("--allow-changed", help="Resume although the recipe changed, where that is safe. Default: refuse."),
]
CompiledOption = Annotated[
    Path | None,
    typer.Option(
        "--compiled",
        metavar="FILE",
        help="Take the compiled step that `pax compile --save FILE` wrote. Default: compile it.",
    ),
]


def train(
    recipe: RecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    source: FromOption = None,
    with_optimizer: WithOptimizerOption = False,
    allow_changed: AllowChangedOption = False,
    compiled: CompiledOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe; go on by itself where the run directory has a checkpoint.

    \b
    Examples:
      pax train tiny
      pax train tiny --set num_layers=2 --set num_train_steps=200 --run-dir runs/small
    """
    restart_tuned()
    configure_jax()
    from paxcli.config.render import recipe_yaml
    from paxcli.config.resolve import resolve

    resolved = resolve(recipe, overlays or (), sets or ())
    directory = run_dir or default_run_dir(resolved.name)
    if dry_run:
        _describe(resolved.config, directory, as_json)
        return

    from paxcli.checkpoint.warm_start import parse_source
    from paxcli.cli.progress import RunReporter
    from paxcli.training.loop import WarmStart, train
    from paxcli.training.run_dir import RunDir

    warm_start = WarmStart(*parse_source(source), everything=with_optimizer) if source else None
    with RunReporter() as report:
        result = train(
            resolved.config, recipe_yaml(resolved), RunDir(directory), report, warm_start, allow_changed, compiled
        )
    if result is not None:
        say_result(result, _summary(result), as_json)


def _describe(config, directory: str | Path, as_json: bool) -> None:
    from paxcli.training.summary import summarize
    from paxcli.training.validate import validate

    validate(config)
    sizes = summarize(config) | {"run_dir": str(directory), "steps": config.task.train.num_train_steps}
    shown = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in sizes.items()]
    say_result(sizes, "Would train; nothing was written.\n" + "\n".join(shown), as_json)


def _summary(result: dict) -> str:
    lines = [f"{result['run_dir']}: {result['steps']} steps, loss {result['loss']:.4f}"]
    for name, metrics in result["eval"].items():
        lines.append(f"eval {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
    lines.append(f"Next: pax plot {result['run_dir']}, pax decode {result['run_dir']}")
    return "\n".join(lines)
