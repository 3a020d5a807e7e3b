"""`pax report`: one HTML page about runs."""

from __future__ import annotations

from typing import Annotated

import typer

import paxcli as pax
from paxcli.cli.options import DryRunOption, JsonOption, RunDirsArgument
from paxcli.cli.output import say_result

_OUT = "Page to write. Default: RUN_DIR/report.html for one run, else report.html."
OutOption = Annotated[str | None, typer.Option(metavar="FILE", help=_OUT)]


def report(
    run_dirs: RunDirsArgument, out: OutOption = None, dry_run: DryRunOption = False, as_json: JsonOption = False
) -> None:
    """Write an HTML page about runs, finished or running. It needs no server and no network.

    It shows curves, values that differ between the recipes, throughput, where the time went, evaluations, decoded
    samples and the environment.

    \b
    Examples:
      pax report runs/tiny
      pax report runs/a runs/b --out compare.html
    """
    path = out or (f"{run_dirs[0].rstrip('/')}/report.html" if len(run_dirs) == 1 else "report.html")
    result = pax.Run(run_dirs[0]).report(*run_dirs[1:], path=path, dry_run=dry_run)
    say_result(result, f"{'Would write' if dry_run else 'Wrote'} {path} ({result['bytes'] / 1e6:.1f} MB)", as_json)
