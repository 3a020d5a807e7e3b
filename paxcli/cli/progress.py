"""How a run goes, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paxcli.cli.output import use_color

_UNKNOWN = "unknown device"


def _stderr() -> Console:
    # In a pipe a report is one line, however long.
    width = None if sys.stderr.isatty() else 10_000
    return Console(file=sys.stderr, no_color=not use_color(sys.stderr), highlight=False, soft_wrap=True, width=width)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Console]:
    """Says on stderr what takes long, on a terminal with the time taken; other lines can be printed meanwhile."""
    console = _stderr()
    if not sys.stderr.isatty():
        console.print(text, markup=False)
        yield console
        return
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield console


class RunReporter:
    """Prints a run's reports to stderr: a live line under them on a terminal, plain lines in a pipe."""

    def __init__(self) -> None:
        self._console = _stderr()
        self._progress: Progress | None = None
        self._peak: float | None = None

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def began(self, facts: dict[str, Any]) -> None:
        """Sizes and devices, and on a terminal the live line."""
        self._peak = facts["peak_flops_per_device"]
        tokens = facts["tokens_per_step"]
        parts = [
            f"{facts['parameters']:,} parameters",
            f"global batch {facts['global_batch_size']:,}" + (f" = {tokens:,} tokens" if tokens else ""),
            f"{facts['devices']} as {facts['mesh']}",
            f"steps {facts['first_step']} → {facts['num_train_steps']}",
        ]
        self.message(" · ".join(parts))
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(
                "compiling", total=facts["num_train_steps"], completed=facts["first_step"]
            )
            self._progress.start()

    def step(self, record: Any) -> None:
        """A logged step, one line."""
        values = record.values
        fields = [f"step {record.step}", f"loss {_number(values['loss'], '.4f')}"]
        if values.get("log_pplx") is not None:
            fields.append(f"log_pplx {values['log_pplx']:.4f}")
        fields.append(f"learning_rate {_number(values['learning_rate'], '.2e')}")
        if values["tokens_per_second"] is not None:
            fields.append(f"tokens/s {values['tokens_per_second']:,.0f}")
        fields.append(self._mfu(values["mfu"]))
        if values["skipped_steps"]:
            fields.append(f"skipped {values['skipped_steps']}")
        left = _duration(values["seconds_left"])
        fields.append(f"left {left}")
        self.message(" · ".join(fields))
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, description=f"step {record.step}, {left} left")

    def evaluated(self, step: int, metrics: dict[str, dict[str, float]]) -> None:
        """One line for each input."""
        for name, values in metrics.items():
            shown = " · ".join(f"{metric} {value:.4f}" for metric, value in values.items())
            self.message(f"step {step} · eval {name} · {shown}")

    def message(self, text: str) -> None:
        """Any other line."""
        self._console.print(text, markup=False)

    def _mfu(self, mfu: float | None) -> str:
        if mfu is None:
            return f"MFU {_UNKNOWN}"
        return f"MFU {mfu:.1%} of {self._peak / 1e12:,.0f} TFLOP/s" if self._peak else f"MFU {mfu:.1%}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    days, rest = divmod(round(seconds), 86_400)
    return (f"{days} d " if days else "") + time.strftime("%H:%M:%S", time.gmtime(rest))
