"""`pax eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from paxcli.cli.options import JsonOption, OverlayOption, RunDirOption, RunOrRecipeArgument, SetOption, StepOption
from paxcli.cli.output import metrics_text, say, say_result
from paxcli.cli.startup import configure_jax, restart_tuned

WatchOption = Annotated[
    bool, typer.Option("--watch", help="Evaluate every new checkpoint until the last step. Default: one, then stop.")
]


def evaluate(
    target: RunOrRecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    step: StepOption = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's checkpoint on the recipe's evaluation inputs.

    \b
    Examples:
      pax eval runs/tiny
      pax eval tiny --step 400 --json
    """
    restart_tuned()
    configure_jax()
    from paxcli.cli.runs import open_run

    with open_run(target, overlays, sets, run_dir) as run:
        if not watch:
            step = run.step(step)
            metrics = run.evaluate(step)
            say_result({"step": step, "metrics": metrics}, metrics_text(step, metrics), as_json)
            return
        evaluations = []
        for step in run.watch():
            metrics = run.evaluate(step)
            evaluations.append({"step": step, "metrics": metrics})
            if not as_json:
                say(metrics_text(step, metrics))
        if as_json:
            say_result(evaluations[-1] | {"evaluations": evaluations}, "", as_json)
