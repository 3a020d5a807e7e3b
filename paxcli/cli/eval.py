"""`pax eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from paxcli.cli.options import JsonOption, OverlayOption, RunDirOption, RunOrRecipeArgument, SetOption, StepOption
from paxcli.cli.output import metrics_text, say, say_result
from paxcli.cli.runs import open_run
from paxcli.errors import ConfigError, DataError
from paxcli.log import log

WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Evaluate every checkpoint as it appears, up to the last step. Default: only one."),
]
FilesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Evaluate on this file or glob; repeatable. Default: the recipe's."),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,…", help="Evaluate on tasks of lm-eval; repeatable. Default: the recipe's."),
]
TasksDirOption = Annotated[
    str | None, typer.Option(metavar="DIR", help="Directory of tasks' YAML files. Default: lm-eval's own tasks.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Examples of each task. Default: all.")]
FewShotOption = Annotated[
    int | None, typer.Option(min=0, help="Solved examples in each prompt of a task. Default: the task's own.")
]
ChatOption = Annotated[
    bool, typer.Option("--apply-chat-template", help="Render tasks' prompts as conversations. Default: as plain text.")
]


def evaluate(
    target: RunOrRecipeArgument,
    sets: SetOption = None,
    overlays: OverlayOption = None,
    run_dir: RunDirOption = None,
    step: StepOption = None,
    watch: WatchOption = False,
    files: FilesOption = None,
    tasks: TasksOption = None,
    tasks_dir: TasksDirOption = None,
    limit: LimitOption = None,
    num_fewshot: FewShotOption = None,
    apply_chat_template: ChatOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's checkpoint. Uses the recipe's evaluation inputs, or text files, or tasks of lm-eval.

    \b
    Examples:
      pax eval runs/tiny
      pax eval tiny --step 750 --json
      pax eval runs/tiny --files README.md --files "docs/*.md"
      pax eval runs/tiny --tasks arc_easy,hellaswag --num-fewshot 5
    """
    names = [name for names in tasks or () for name in names.split(",") if name]
    given = {"tasks_dir": tasks_dir, "limit": limit, "num_fewshot": num_fewshot}
    given |= {"apply_chat_template": apply_chat_template or None}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not names and (tasks is not None or settings):
        raise ConfigError("There is no task to run.", "Name one: `--tasks NAME`.")
    if watch and step is not None:
        raise ConfigError("--watch evaluates every checkpoint, and --step one.", "Leave out one of them.")
    run = open_run(target, overlays, sets, run_dir, as_json)
    evaluations = []
    for at in run.watch() if watch else [run.step(step)]:
        try:
            metrics = run.evaluate(at, files or (), names, **settings)
        except DataError:
            if not watch or at in run.steps:
                raise
            log.info("The checkpoint of step %d was deleted before it was evaluated.", at)
            continue
        evaluations.append({"step": at, "metrics": metrics})
        if not as_json:
            say(_table(at, metrics) if names else metrics_text(at, metrics))
    if not evaluations:
        raise DataError("Every checkpoint was deleted before it was evaluated.", "Raise `checkpoint.save_max_to_keep`.")
    if as_json:
        say_result(evaluations[-1] | ({"evaluations": evaluations} if watch else {}), "", as_json)


def _table(step: int, metrics: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each metric of a task."""
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "stderr", "examples", "few-shot")]
    for task, values in metrics.items():
        counts = tuple(str(values.get(name, "")) for name in ("num_examples", "num_fewshot"))
        for name, value in values.items():
            if "_stderr" not in name and not name.startswith("num_"):
                metric, comma, kind = name.partition(",")
                error = values.get(f"{metric}_stderr{comma}{kind}")
                rows.append((task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}", *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"step {step}", *lines])
