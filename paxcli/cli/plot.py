"""`pax plot`: curves of runs, as an image and in the terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, RunDirsArgument
from paxcli.cli.output import say_result
from paxcli.log import use_color

if TYPE_CHECKING:
    from paxcli.metrics.curves import Series

MetricOption = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="Metric to plot. Repeatable. Default: loss and log_pplx."),
]
OutOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Image to write. Default: RUN_DIR/METRIC.png, or plot.png for several runs."),
]
SmoothingOption = Annotated[
    float, typer.Option(metavar="0…1", help="Moving average of training values, such as 0.9; 0 = off.")
]
LogOption = Annotated[Literal["", "x", "y", "xy"], typer.Option(help="Axes with a logarithmic scale.")]


def plot(
    run_dirs: RunDirsArgument,
    metrics: MetricOption = None,
    smoothing: SmoothingOption = 0.0,
    log: LogOption = "",
    out: OutOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plot curves of runs, as an image and in the terminal. The runs may be finished or running.

    \b
    Examples:
      pax plot runs/tiny
      pax plot runs/a runs/b --metric log_pplx --smoothing 0.9 --log x --out compare.svg
    """
    from paxcli.metrics.curves import default_metrics, read_runs, series
    from paxcli.report.terminal import plot_text

    runs = read_runs(run_dirs)
    metrics = metrics or default_metrics(runs)
    view: dict[str, Any] = {"smoothing": smoothing, "log": log}
    name = metrics[0].replace("/", ".")
    path = out or (f"{run_dirs[0].rstrip('/')}/{name}.png" if len(run_dirs) == 1 else "plot.png")
    pax.Run(run_dirs[0]).plot(*run_dirs[1:], metrics=metrics, path=None if dry_run else path, **view)
    width = min(shutil.get_terminal_size().columns, 120)
    drawn = [] if as_json else [plot_text(runs, metric, width, 18, use_color(sys.stdout), **view) for metric in metrics]
    summaries = {run.name: {metric: _summary(series(run, metric)) for metric in metrics} for run in runs}
    result = {"path": path, "metrics": metrics, "runs": summaries}
    say_result(result, "\n".join([*drawn, f"{'Would write' if dry_run else 'Wrote'} {path}"]), as_json)


def _summary(curves: list[Series]) -> dict[str, dict[str, float]]:
    """Split → number of points, and the last one."""
    return {one.split: {"points": len(one.steps), "last_step": one.steps[-1], "last": one.values[-1]} for one in curves}
