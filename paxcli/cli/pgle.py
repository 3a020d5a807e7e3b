"""`pax pgle …` and `pax pgle-profile`: profile-guided latency estimation on GPUs."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, OverlayOption, RecipeArgument, RunDirOption, SetOption
from paxcli.cli.output import say_result
from paxcli.cli.runs import open_recipe
from paxcli.cli.train import AllowChangedOption, run_text
from paxcli.jax_defaults import configure_jax
from paxcli.profiling.xla_log import XlaLog

app = typer.Typer(no_args_is_help=True, help="Let XLA schedule by measured costs (PGLE; NVIDIA GPUs).")

StepsOption = Annotated[int, typer.Option(min=1, help="Number of steps to trace. Default: 5.")]
WarmupOption = Annotated[int, typer.Option(min=1, help="Number of steps to run before them. Default: 5.")]
PercentileOption = Annotated[
    int, typer.Option(min=1, max=100, help="Percentile of a cost over the steps. Default: 90.")
]
ProfileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A profile, binary (.pb) or text (.pbtxt).")]
TopOption = Annotated[int, typer.Option(min=1, help="Number of instructions to show. Default: 20.")]


@app.command("collect")
def collect(
    recipe: RecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    steps: StepsOption = 5,
    warmup: WarmupOption = 5,
    percentile: PercentileOption = 90,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the cost of each instruction of a train step. Writes the profile to RUN_DIR/profile/.

    \b
    Examples:
      pax pgle collect c4-1b --run-dir runs/1b
      pax pgle collect c4-1b --steps 10 --percentile 50
    """
    from paxcli.profiling.collect import collect

    settings = {"steps": steps, "warmup": warmup, "percentile": percentile}
    run = open_recipe(recipe, overlays, sets, run_dir, as_json, dry_run)
    if measured := _measure(collect, run, settings, dry_run, as_json):
        text = f"Wrote {measured['profile']} and .pbtxt: {measured['instructions']} instructions."
        say_result(measured, f"{text}\nNext: pax pgle apply {shlex.quote(recipe)}", as_json)


@app.command("apply")
def apply(
    recipe: RecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    allow_changed: AllowChangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe with the profile in RUN_DIR/profile/. Resumes from the latest checkpoint, if there is one.

    A profile of another recipe, other flags, versions or devices is rejected.

    \b
    Examples:
      pax pgle apply c4-1b --run-dir runs/1b
      pax pgle apply c4-1b --json
    """
    configure_jax(verbose_compiler=True)
    run = open_recipe(recipe, overlays, sets, run_dir, as_json)

    from paxcli.profiling.apply import open_profile
    from paxcli.training.loop import train
    from paxcli.training.run_dir import RunDir

    directory = RunDir(run.path)
    with XlaLog() as xla_log:
        instrument = open_profile(run.config, directory, xla_log)
        result = train(run.config, run.recipe.yaml(), directory, allow_changed=allow_changed, instrument=instrument)
    if result is not None:
        say_result(result, run_text(result), as_json)


@app.command("show")
def show(file: ProfileArgument, top: TopOption = 20, as_json: JsonOption = False) -> None:
    """Print a profile: program, size, costliest instructions.

    \b
    Examples:
      pax pgle show runs/1b/profile/profile.pb
      pax pgle show runs/1b/profile/profile.pbtxt --json
    """
    from etils import epath

    from paxcli.profiling.costs import describe, read_costs

    found = describe(read_costs(epath.Path(file)), top)
    lines = [f"{found['instructions']} instructions, {found['total_microseconds']:,.1f} us"]
    lines += [f"of program {fingerprint}" for fingerprint in found["fingerprints"]]
    lines += [f"  {one['microseconds']:12,.1f} us  {one['name']}" for one in found["costliest"]]
    say_result(found, "\n".join(lines), as_json)


def pgle_profile(
    recipe: RecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    steps: StepsOption = 5,
    warmup: WarmupOption = 5,
    percentile: PercentileOption = 90,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Collect a profile, and time the step with and without it.

    \b
    Examples:
      pax pgle-profile c4-1b --run-dir runs/1b
      pax pgle-profile c4-1b --steps 10 --json
    """
    configure_jax(verbose_compiler=True)
    from paxcli.profiling.compare import compare

    settings = {"steps": steps, "warmup": warmup, "percentile": percentile}
    with XlaLog() as xla_log:
        run = open_recipe(recipe, overlays, sets, run_dir, as_json, dry_run)
        measured = _measure(functools.partial(compare, xla_log=xla_log), run, settings, dry_run, as_json)
    if measured:
        say_result(measured, _comparison(measured, recipe), as_json)


def _measure(verb: Callable[..., Any], run: pax.Run, settings: dict[str, int], dry_run: bool, as_json: bool) -> Any:
    """Result of `verb` on a run; None after a dry run, and on every process but process 0."""
    from paxcli.profiling.runner import require_profile_device
    from paxcli.training.run_dir import RunDir

    directory = RunDir(run.path)
    if not dry_run:
        return verb(run.config, directory, **settings)
    require_profile_device(run.config)
    text = f"Would trace {settings['steps']} steps after {settings['warmup']} others and write to {directory.profile}."
    say_result({"profile_dir": str(directory.profile)} | settings, text, as_json)
    return None


def _comparison(measured: dict[str, Any], recipe: str) -> str:
    lines = [f"{'':<8}{'ms a step':>12}{'exposed communication':>24}"]
    for name in ("before", "after"):
        one = measured[name]
        lines.append(f"{name:<8}{one['median_step_seconds'] * 1e3:>12.2f}{one['exposed_communication']:>24.1%}")
    rounds = f"medians of {measured['after']['steps']} steps each, in alternating rounds"
    lines += [f"speedup {measured['speedup']:.3f}: {rounds}", f"Next: pax pgle apply {shlex.quote(recipe)}"]
    return "\n".join(lines)
