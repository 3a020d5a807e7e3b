"""Writes HTML pages that hold all that they show: they need no server and no network."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from paxcli import __version__
from paxcli.config.paths import write_output
from paxcli.metrics.curves import few_digits
from paxcli.metrics.goodput import CAUSES
from paxcli.report import content


def write_report(run_dirs: Sequence[epath.PathLike], path: epath.PathLike, dry_run: bool = False) -> dict[str, Any]:
    """Writes a page about runs: curves, differences, speed, time by cause, samples, evaluations, environment.

    Args:
      run_dirs: The runs, finished or running.
      path: The page.
      dry_run: Whether to write nothing.

    Returns:
      `path`, `runs` (name → `run_dir`, last `step`, and the last value of each metric that sums up a run), `bytes`.

    Raises:
      DataError: A run has no metrics, or a file of it is damaged.
      MissingError: The page cannot be written.
    """
    runs = content.read_reported_runs(run_dirs)
    groups = content.chart_groups(runs)
    size = write_page(
        "report.html",
        path,
        dry_run,
        title=", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs",
        runs=runs,
        groups=groups,
        differing=content.differing_values(runs),
        causes=CAUSES,
        data={"runs": [{"name": run.name, "splits": run.curves()} for run in runs], "groups": groups},
        plotly=_plotly(),
    )
    summaries = {run.name: {"run_dir": run.path, "step": run.last_step, **run.facts()} for run in runs}
    return {"path": str(path), "runs": summaries, "bytes": size}


def write_page(template: str, path: epath.PathLike, dry_run: bool = False, **values: Any) -> int:
    """Writes a page that needs no other file, and returns its number of bytes.

    Args:
      template: Its file in `templates/`, which extends `base.html`.
      path: The page.
      dry_run: Whether to write nothing.
      values: The template's variables.

    Raises:
      MissingError: The page cannot be written.
    """
    import jinja2

    environment = jinja2.Environment(  # escapes what the values hold: it is data, and never markup
        loader=jinja2.PackageLoader("paxcli.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "share": "{:.1%}".format}
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    page = environment.get_template(template).render(version=__version__, written=written, **values)
    content = page.encode(errors="backslashreplace")  # the run's command may have had bytes that are not UTF-8
    if not dry_run:
        write_output(path, content)
    return len(content)


def _plotly() -> str:
    """Plotly's JavaScript. Its Python package is only located, since importing it is slow."""
    installed = importlib.metadata.distribution("plotly")
    return epath.Path(installed.locate_file("plotly/package_data/plotly.min.js")).read_text()  # pyrefly: ignore


def _number(value: Any) -> str:
    """A number of a table, with few digits; texts unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else few_digits(value)
