"""Draws curves as text, for the terminal."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

from paxcli.metrics.curves import RunMetrics, curve_label, eval_markers, few_digits, finite, series, smooth, title_of
from paxcli.metrics.writers import TRAIN

_TRAIN_MARKERS = ("braille", "+", "*", "#", "~")  # one for each run
_EVAL_MARKERS = "●■◆▲▼"
_LEGEND = {"braille": "⠒"}


def plot_text(
    runs: Sequence[RunMetrics],
    metric: str,
    width: int = 80,
    height: int = 20,
    color: bool = False,
    smoothing: float = 0.0,
    log: str = "",
) -> str:
    """Draws one metric of every run as text of `width` by `height` characters, with the names of the curves below."""
    import plotext

    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.plot_size(width, height)
    figure.title(f"{title_of(runs)}: {metric} by step")
    curves = [(index, run, smooth(curve, smoothing)) for index, run in enumerate(runs) for curve in series(run, metric)]
    markers = eval_markers(runs, metric, _EVAL_MARKERS)
    names = []
    for index, run, curve in curves:
        line = _TRAIN_MARKERS[index % len(_TRAIN_MARKERS)]
        marker = markers.get(curve.split, line)
        for known, points in itertools.groupby(zip(curve.steps, curve.values, strict=True), lambda x: x[1] == x[1]):
            if known:
                steps, values = zip(*points, strict=True)
                signal = figure.signal(_scale(steps, "x" in log), _scale(values, "y" in log), marker=marker)
                signal.lines(curve.split == TRAIN)
                figure.draw(signal)
        names.append(f"{_LEGEND.get(marker, marker)} {curve_label(runs, run, curve)}")
    for axis, field in (("x", "steps"), ("y", "values")):
        places = _scale([place for _, _, curve in curves for place in finite(getattr(curve, field))], axis in log)
        low, high = min(places), max(places)
        ticks = (low + (high - low) * part / 5 for part in range(6))
        values = (10**tick if axis in log else tick for tick in ticks)
        shown = sorted({float(round(x)) if axis == "x" else x for x in values})
        labels = [f"{x:.0f}" if axis == "x" else few_digits(x) for x in shown]
        figure.ruler(axis).ticks(_scale(shown, axis in log), labels)
    built = figure.build()
    legend = " \u00a0 ".join(name.replace(" ", "\u00a0") for name in names)
    legend = textwrap.fill(legend, width, break_on_hyphens=False).replace("\u00a0", " ")
    return (str(built) if color else str(plotext.uncolorize(built))).rstrip("\n") + f"\n{legend}\n"


def _scale(values: Sequence[float], log: bool) -> list[float]:
    """The values, or their logarithms."""
    return [math.log10(value) for value in values] if log else list(values)
