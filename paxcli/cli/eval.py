"""`pax eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from paxcli.cli.options import JsonOption, OverlayOption, RunDirOption, RunOrRecipeArgument, SetOption, StepOption
from paxcli.cli.output import metrics_text, say, say_result
from paxcli.cli.remote import OnOption, run_on
from paxcli.cli.runs import open_run
from paxcli.cli.startup import restart_tuned

WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Evaluate every checkpoint as it appears, up to the last step. Default: only one."),
]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--files",
        metavar="PATH",
        help="Evaluate on all text of this file or glob instead; repeatable. Default: the recipe's evaluation inputs.",
    ),
]


def evaluate(
    ctx: typer.Context,
    target: RunOrRecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    step: StepOption = None,
    watch: WatchOption = False,
    files: FilesOption = None,
    as_json: JsonOption = False,
    on: OnOption = None,
) -> None:
    """Evaluate a run's checkpoint on the recipe's evaluation inputs, or on text files.

    \b
    Examples:
      pax eval runs/tiny
      pax eval tiny --step 400 --json
      pax eval runs/tiny --files README.md --files "docs/*.md"
    """
    if on is not None:
        return run_on(on, ctx)
    restart_tuned()
    run = open_run(target, overlays, sets, run_dir)
    evaluations = []
    for at in run.watch() if watch else [run.step(step)]:
        metrics = run.evaluate(at, files or ())
        evaluations.append({"step": at, "metrics": metrics})
        if not as_json:
            say(metrics_text(at, metrics))
    if as_json:
        say_result(evaluations[-1] | ({"evaluations": evaluations} if watch else {}), "", as_json)
