"""`pax compile`: compiles a recipe's step ahead of time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from paxcli.cli.options import JsonOption, OverlayOption, RecipeArgument, SetOption, file_option
from paxcli.cli.output import say_result
from paxcli.cli.runs import load_recipe
from paxcli.config.paths import write_output
from paxcli.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from rich.console import Console

_GIB = 1 << 30

TopologyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Devices to compile for: v4-128, v5e-16, v5p-256, v6e-8, tpu7x-64, v4:4x4x12, h100:8, cpu:8. "
        "Default: the TPU v4 slice with as many chips as the recipe's mesh.",
    ),
]
SlicesOption = Annotated[int | None, typer.Option(min=1, help="Number of slices. Default: as in the recipe's mesh.")]
StepOption = Annotated[
    Literal["train", "eval", "decode"], typer.Option(help="Step to compile. Default: train.", show_default=False)
]
SaveOption = Annotated[Path | None, file_option("Save the executable; of a search, the best overlay. Default: none.")]
HloOption = Annotated[Path | None, file_option("Write the optimized HLO. Default: none.")]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="List what bounds the predicted step, by layer. Default: off.")
]
SearchOption = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Compile the most promising meshes, remat policies and batch sizes, and rank them. Default: off.",
    ),
]


def compile(
    recipe: RecipeArgument,
    topology: TopologyOption = None,
    slices: SlicesOption = None,
    step: StepOption = "train",
    save: SaveOption = None,
    hlo: HloOption = None,
    explain: ExplainOption = False,
    search: SearchOption = False,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a step ahead of time, without its devices. Prints memory, communication and the predicted time.

    \b
    Examples:
      pax compile c4-1b --topology v4-8
      pax compile tiny --topology cpu:8 --save tiny.step
    """
    if search and (hlo or explain or step != "train"):
        raise ConfigError("--search cannot be combined with --hlo, --explain or --step.", "Leave them out.")
    resolved = load_recipe(recipe, overlays, sets)
    from paxcli.programs.ahead_of_time import compile_ahead, describe_shortage, target_of
    from paxcli.programs.estimate import find_rates

    target = target_of(resolved.config, topology, slices)
    if explain:
        find_rates(target)  # raises before it compiles, if no time can be predicted
    what = f"{target.num_slices} × {target.name}" if target.num_slices > 1 else target.name
    if search:
        return _search(resolved, target, what, save, as_json)
    with _waiting(f"Compiling the {step} step of {resolved.name} for {what}; this takes minutes."):
        compiled = compile_ahead(resolved.config, target, step, save)
    report = {"recipe": resolved.name} | compiled.report
    text = _text(report, what) + (_explain(report) if explain else "") if report["fits"] else ""
    failure = compiled.unsaved
    if not report["fits"]:
        hint = "Find settings that fit with `--search`; or lower `percore_batch_size`, or set remat_policy=nothing."
        failure = ConfigError(f"{resolved.name} does not fit on {what}: {describe_shortage(report)}.", hint)
    try:
        if hlo and compiled.text:
            write_output(hlo, compiled.text.encode())
    except MissingError as error:
        failure = failure or error
    say_result(report, text, as_json, failure)


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[Console]:
    """Prints `text` to stderr, on a terminal with the time elapsed. Yields the console, to print other lines."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from paxcli.training.progress import progress_console

    console, is_terminal = progress_console(), sys.stderr.isatty()
    if not is_terminal:
        console.print(text, markup=False)
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not is_terminal, transient=True) as progress:
        progress.add_task(text, total=None)
        yield console


def _explain(report: dict[str, Any]) -> str:
    bounds = [f"bound by {name}, {one['share']:.1%}: {one['change']}" for name, one in report["bounds"].items()]
    line = "{share:6.1%}  {bound}  {layer}  {what}"
    parts = [line.format(**one | {"layer": one["layer"] or "(not known)"}) for one in report["costs"]]
    return "\n".join(["", *bounds, "largest parts of the step:", *parts])


def _search(resolved: Any, target: Any, what: str, save: Path | None, as_json: bool) -> None:
    from paxcli.config.render import value_text
    from paxcli.programs.search import Trial, search

    with _waiting(f"Searching settings of {resolved.name} for {what}; this takes minutes for each line.") as console:

        def on_trial(trial: Trial, best: Trial) -> None:
            console.print(_line(trial.settings, trial.report), markup=False)
            if save and best.report["fits"]:  # now, since the search may be interrupted
                write_output(save, yaml.safe_dump(best.settings, sort_keys=False).encode())

        trials = search(resolved.config, target, on_trial)
    ranked = [{"settings": trial.settings} | trial.report for trial in trials]
    if not ranked[0]["fits"]:
        hint = "Choose a larger `--topology`, or a smaller model."
        raise ConfigError(f"No settings fit on {what}. The closest: {_line(ranked[0]['settings'], ranked[0])}.", hint)
    lines = [_line(one["settings"], one) for one in ranked if one["fits"]]
    sets = " ".join(f"--set '{path}={value_text(value)}'" for path, value in ranked[0]["settings"].items())
    result = {"recipe": resolved.name, "topology": target.name, "num_slices": target.num_slices, "ranked": ranked}
    say_result(result, "\n".join([*lines, f"Best: {sets or 'the recipe unchanged'}"]), as_json)


def _line(settings: dict[str, Any], report: dict[str, Any]) -> str:
    changes = ", ".join(f"{path.rsplit('.', 1)[-1]}={value}" for path, value in settings.items()) or "unchanged"
    if not report["fits"]:
        from paxcli.programs.ahead_of_time import describe_shortage

        return f"{changes}: does not fit; {describe_shortage(report)}"
    return f"{changes}: {_gib(report['hbm_needed_bytes'])} GiB, {_prediction(report)}"


def _text(report: dict[str, Any], what: str) -> str:
    memory, available = report["memory"], report["hbm_available_bytes"]
    most = "at most " if memory["host_bytes"] else ""
    lines = [
        f"{report['recipe']}, {report['step']} step, on {what}: "
        f"{report['num_devices']} × {report['device_kind']} as {report['mesh']}",
        f"fits: {most}{_gib(report['hbm_needed_bytes'])}"
        + (f" of {_gib(available)}" if available else "")
        + " GiB of each device",
        "  " + ", ".join(f"{name.removesuffix('_bytes')} {_gib(size)}" for name, size in memory.items()) + "; of these "
        f"parameters {_gib(report['parameters_bytes_per_device'])}, "
        f"optimizer {_gib(report['optimizer_bytes_per_device'])}",
        "  These sizes do not add up to the memory that is needed: outputs replace donated arguments (alias), and",
        "  temporaries reuse the memory of arguments that are no longer read.",
        f"predicted: {_prediction(report)}",
    ]
    if (error := report["prediction_error"]) and report["step"] == "train":
        lines.append(f"  measured training steps on such devices ran within {error:.0%} of their predicted speed")
    if report["predicted_step_seconds"]:
        lines.append("  " + ", ".join(f"{name} {share:.1%}" for name, share in report["shares"].items() if share))
        lines += [f"  not included: {item}" for item in report["left_out"]]
    for one in report["collectives"]:
        lines.append(f"{one['kind']} over {one['network']}: {one['count']:,} times, {_gib(one['bytes'])} GiB")
    if moved := report["host_transfers"]["bytes"]:
        lines.append(f"between device and host: {report['host_transfers']['count']:,} times, {_gib(moved)} GiB")
    for shape in report["stacked_all_gathers"]:
        lines.append(f"warning: {shape}, the parameters of all layers, is all-gathered at once")
    lines += [f"option {name}={value}" for name, value in report["compiler_options"].items()]
    return "\n".join([*lines, f"compiled in {report['compile_seconds']:.0f} s"])


def _prediction(report: dict[str, Any]) -> str:
    seconds, mfu, rate = (report[f"predicted_{name}"] for name in ("step_seconds", "mfu", "tokens_per_second"))
    if not seconds:
        return "unknown for this device"
    shown = [f"{seconds:.3g} s a step"]
    shown += [f"MFU {mfu:.1%}"] if mfu else []
    shown += [f"{rate:,.0f} tokens/s"] if rate else []
    return ", ".join(shown)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}"
