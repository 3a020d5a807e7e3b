"""Plots the metrics of finished and running runs: as an image, and as text in the terminal."""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from paxcli.config.paths import write_output
from paxcli.errors import ConfigError, DataError, names_hint
from paxcli.metrics.writers import TRAIN, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "metrics.jsonl"

_STYLE = Path(__file__).parent / "data" / "plot_style.yaml"
_EVAL_MARKERS = "osD^v"  # one for each evaluation input, the same in every run


class RunMetrics(NamedTuple):
    """The logged lines of a run's `metrics.jsonl`."""

    name: str
    lines: list[dict[str, Any]]


class Series(NamedTuple):
    """One curve: the values of a metric on one split at each step, NaN where the logged value was not finite."""

    split: str
    steps: list[int]
    values: list[float]


def read_runs(run_dirs: Sequence[epath.PathLike], sample: bool = True) -> list[RunMetrics]:
    """Reads the metrics of runs. A run is named after its directory, or by the full path if two have the same name.

    Args:
      run_dirs: The run directories.
      sample: Read a sample of long files, which is enough for a picture.

    Raises:
      DataError: A run has no metrics.
    """
    paths = [epath.Path(run_dir).expanduser() for run_dir in run_dirs]
    names = [path.resolve().name.encode(errors="backslashreplace").decode() for path in paths]
    return [
        RunMetrics(name if names.count(name) == 1 else os.fspath(path), _read_lines(path, sample))
        for name, path in zip(names, paths, strict=True)
    ]


def metric_names(runs: Sequence[RunMetrics]) -> list[str]:
    """All metrics of the runs, in the order in which they were logged."""
    names = {name: None for run in runs for line in run.lines for name in line}
    return [name for name in names if name not in ("step", "split")]


def default_metrics(runs: Sequence[RunMetrics]) -> list[str]:
    """Metrics to plot by default: the loss, and the log-perplexity if it differs from the loss."""
    differs = any(line.get("log_pplx") not in (None, line.get("loss")) for run in runs for line in run.lines)
    return ["loss", "log_pplx"] if differs else ["loss"]


def series(run: RunMetrics, metric: str) -> list[Series]:
    """The curves of one metric that have a value: training first, then each evaluation input."""
    points: dict[str, dict[int, float]] = {TRAIN: {}}
    for line in run.lines:
        if metric in line:
            points.setdefault(line["split"], {})[line["step"]] = math.nan if line[metric] is None else line[metric]
    in_order = {split: sorted(by_step.items()) for split, by_step in points.items() if finite(by_step.values())}
    return [Series(split, *map(list, zip(*pairs, strict=True))) for split, pairs in in_order.items()]


def finite(values: Iterable[float]) -> list[float]:
    """The values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def check_metric(runs: Sequence[RunMetrics], metric: str, log: str = "") -> None:
    """Checks that every run has values of a metric, for axes with a logarithmic scale (as in `draw`).

    Raises:
      ConfigError: No run has such a metric.
      DataError: A run has no values of it, or one without a logarithm.
    """
    names = metric_names(runs)
    if metric not in names:
        raise ConfigError(f"No run has a metric `{metric}`.", names_hint(metric, names))
    for run in runs:
        if not (curves := series(run, metric)):
            raise DataError(f"Run {run.name} has no values of `{metric}`.", "Plot another metric, or leave it out.")
        values = [value for curve in curves for value in finite(curve.values)]
        smallest = {"x": min(curve.steps[0] for curve in curves), "y": min(values)}
        for axis in log:
            if smallest[axis] <= 0:
                hint = "Leave out `--log`, or plot another metric."
                raise DataError(f"A logarithmic axis has no place for {smallest[axis]:g}, of run {run.name}.", hint)


def smooth(curve: Series, weight: float) -> Series:
    """The exponential moving average of training values, corrected for its start; an evaluation's are unchanged.

    Raises:
      ConfigError: `weight`, that of the past, is not in [0, 1).
    """
    if not 0 <= weight < 1:
        raise ConfigError(f"A smoothing of {weight:g} is not from 0 to below 1.", "Try 0.9.")
    if curve.split != TRAIN:
        return curve
    known = finite(curve.values)
    sums = itertools.accumulate(known, lambda mean, value: weight * mean + (1 - weight) * value, initial=0.0)
    means = (mean / (1 - weight**n) for n, mean in enumerate(sums) if n)
    return curve._replace(values=[value if math.isnan(value) else next(means) for value in curve.values])


def draw(runs: Sequence[RunMetrics], metrics: Sequence[str], smoothing: float = 0.0, log: str = "") -> Figure:
    """A figure with one panel for each metric, which has the curves of every run.

    Args:
      runs: The runs.
      metrics: The metrics.
      smoothing: Weight of the past in a moving average of training values, which are then faint behind it; 0 = off.
      log: Axes with a logarithmic scale: `x`, `y` or `xy`.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports where it caches fonts
    import matplotlib.style

    from paxcli.metrics.figure import NotebookFigure

    with matplotlib.style.context(_STYLE):
        figure = NotebookFigure(figsize=(1.2 + 5.4 * len(metrics), 4.2), dpi=150, layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        lines = [_draw_panel(panel, runs, name, smoothing, log) for panel, name in zip(panels, metrics, strict=True)]
        figure.set_figheight(4.2 + 0.2 * max(0, *lines))
        figure.suptitle(textwrap.fill(title_of(runs), 60 * len(metrics)), fontsize=11, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: epath.PathLike) -> None:
    """Writes a figure as an image of the format that the file name's suffix names."""
    path = epath.Path(path).expanduser()
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"{path} cannot be written as an image.", f"End it in one of {', '.join(formats)}.")
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:])
    write_output(path, image.getvalue())


def _read_lines(run_dir: epath.Path, sample: bool) -> list[dict[str, Any]]:
    path = run_dir / FILE_NAME
    if not path.exists():
        raise DataError(f"{run_dir} has no {FILE_NAME}.", "Give the run directory that `pax train` wrote.")
    if lines := list(read_lines(path, sample)):
        return lines
    raise DataError(f"{path} has no metrics yet.", "Wait for the run's first logged step.")


def _draw_panel(panel: Any, runs: Sequence[RunMetrics], metric: str, smoothing: float, log: str) -> int:
    """Draws the curves of a metric; returns the lines of the legend below the panel, 0 for a short one inside."""
    markers = eval_markers(runs, metric, _EVAL_MARKERS)
    for index, run in enumerate(runs):
        for curve in series(run, metric):
            style: dict[str, Any] = {"color": f"C{index % 10}", "markeredgecolor": "white"}
            style["marker"] = markers.get(curve.split, "o" if len(finite(curve.values)) == 1 else "")
            style |= {"alpha": 0.8} if curve.split == TRAIN else {"linestyle": ":"}
            if curve.split == TRAIN and smoothing:
                panel.plot(curve.steps, curve.values, **style | {"alpha": 0.25})
            label = textwrap.fill(curve_label(runs, run, curve), 56)
            panel.plot(curve.steps, smooth(curve, smoothing).values, label=label, **style)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set(xlabel="step", ylabel=metric, **{f"{axis}scale": "log" for axis in log})
    lines = sum(label.count("\n") + 1 for label in panel.get_legend_handles_labels()[1])
    panel.legend(**{"loc": "upper left", "bbox_to_anchor": (0, -0.14)} if lines > 6 else {})
    return lines if lines > 6 else 0


def eval_markers(runs: Sequence[RunMetrics], metric: str, markers: str) -> dict[str, str]:
    """A marker for each split except training."""
    splits = {curve.split: None for run in runs for curve in series(run, metric) if curve.split != TRAIN}
    return {split: markers[index % len(markers)] for index, split in enumerate(splits)}


def curve_label(runs: Sequence[RunMetrics], run: RunMetrics, curve: Series) -> str:
    """Name of a curve, with its last value: late differences are too small to read off the plot."""
    name = f"{run.name} {curve.split}" if len(runs) > 1 else curve.split
    return f"{name}, last {few_digits(curve.values[-1])}"


def few_digits(value: float) -> str:
    """A number to read: `0.01235`, `3.193`, `11,580`; of more than 12 digits `1.158e+13`; `not finite` for NaN."""
    if math.isnan(value):
        return "not finite"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"


def title_of(runs: Sequence[RunMetrics]) -> str:
    """The names of the runs, or how many there are."""
    return ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
