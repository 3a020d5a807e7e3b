"""`pax train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, RecipeArgument, RunDirOption, SetOption
from paxcli.cli.output import say_result
from paxcli.cli.runs import default_run_dir
from paxcli.cli.startup import configure_jax, restart_tuned
from paxcli.errors import ConfigError

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
ProfileStepsOption = Annotated[
    str | None, typer.Option("--profile-steps", metavar="FIRST:LAST", help="Trace these steps. Default: none.")
]
AutoPgleOption = Annotated[
    bool,
    typer.Option("--auto-pgle", help="JAX profiles the first steps and compiles again by it, on GPUs. Default: off."),
]
PgleRunsOption = Annotated[
    int | None, typer.Option("--pgle-runs", min=1, help="With --auto-pgle: steps to profile. Default: 3.")
]
PglePercentileOption = Annotated[
    int | None,
    typer.Option("--pgle-percentile", min=1, max=100, help="With --auto-pgle: of an instruction's costs. Default: 90."),
]
ExpectPgleOption = Annotated[
    bool,
    typer.Option(
        "--expect-pgle", help="Take the program that --auto-pgle left in JAX's cache, profile nothing. Default: off."
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
    profile_steps: ProfileStepsOption = None,
    auto_pgle: AutoPgleOption = False,
    pgle_runs: PgleRunsOption = None,
    pgle_percentile: PglePercentileOption = None,
    expect_pgle: ExpectPgleOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe; go on by itself where the run directory has a checkpoint.

    \b
    Examples:
      pax train tiny
      pax train tiny --set num_layers=2 --set num_train_steps=200 --run-dir runs/small
      pax train tiny --profile-steps 10:15 --run-dir runs/traced
    """
    _check_pgle(auto_pgle, pgle_runs, pgle_percentile, expect_pgle, profile_steps)
    _check_compiled(compiled, auto_pgle or expect_pgle or profile_steps is not None)
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
    from paxcli.profiling.auto import auto_pgle as automatic
    from paxcli.profiling.auto import expected_pgle
    from paxcli.profiling.steps import StepTracer, parse_steps
    from paxcli.programs.executable import Precompiled
    from paxcli.training.loop import WarmStart, train
    from paxcli.training.run_dir import RunDir

    run = RunDir(directory)
    if auto_pgle:
        instrument = automatic(resolved.config, pgle_runs or 3, pgle_percentile or 90)
    elif expect_pgle:
        instrument = expected_pgle(resolved.config)
    elif compiled is not None:
        instrument = Precompiled(compiled)
    else:
        steps = parse_steps(profile_steps, resolved.config.task.train.num_train_steps) if profile_steps else None
        instrument = StepTracer(run.profile, steps)
    warm_start = WarmStart(*parse_source(source), everything=with_optimizer) if source else None
    with RunReporter() as report:
        text = recipe_yaml(resolved)
        result = train(resolved.config, text, run, report, warm_start, allow_changed, instrument)
    if result is not None:
        say_result(result, run_text(result), as_json)


def _check_pgle(auto: bool, runs: int | None, percentile: int | None, expect: bool, profile_steps: str | None) -> None:
    """Raises ConfigError when options do not go together."""
    if (runs or percentile) and not auto:
        raise ConfigError("--pgle-runs and --pgle-percentile say how --auto-pgle profiles.", "Add `--auto-pgle`.")
    if auto and expect:
        raise ConfigError("--auto-pgle profiles, and --expect-pgle takes what it left.", "Give one of them.")
    if profile_steps and (auto or expect):
        raise ConfigError(
            "--profile-steps traces a step that is compiled ahead of time; JAX's automatic mode has none such.",
            "Trace in another run, or train with `pax pgle apply`.",
        )


def _check_compiled(compiled: Path | None, profiles: bool) -> None:
    """Raises ConfigError when there is no such file, or the step is to be profiled too."""
    if compiled is not None and profiles:
        raise ConfigError("--compiled takes a step as it is; profiling compiles it.", "Leave out one of them.")
    if compiled is not None and not compiled.is_file():
        raise ConfigError(f"There is no file {compiled}.", "Make it: `pax compile RECIPE --save FILE`.")


def _describe(config, directory: str | Path, as_json: bool) -> None:
    from paxcli.training.summary import summarize
    from paxcli.training.validate import validate

    validate(config)
    sizes = summarize(config) | {"run_dir": str(directory), "steps": config.task.train.num_train_steps}
    shown = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in sizes.items()]
    say_result(sizes, "Would train; nothing was written.\n" + "\n".join(shown), as_json)


def run_text(result: dict) -> str:
    """What a training run came to, for people."""
    lines = [f"{result['run_dir']}: {result['steps']} steps, loss {result['loss']:.4f}"]
    for name, metrics in result["eval"].items():
        lines.append(f"eval {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
    lines.append(f"Next: pax plot {result['run_dir']}, pax decode {result['run_dir']}")
    return "\n".join(lines)
