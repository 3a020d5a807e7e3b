"""Prints a run's progress: on a terminal, in a pipe, in a notebook."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paxcli.log import silence, use_color
from paxcli.metrics.text import values_text

if TYPE_CHECKING:
    from paxcli.metrics.meter import Record

_UNWRAPPED = 10_000  # the width of a console whose lines are not wrapped, in characters


class Reporter:
    """Receives a run's progress: start, steps, evaluations, messages. This one discards all of it."""

    def start(self, facts: dict[str, Any]) -> None:
        """The run starts or resumes. `facts`: sizes, devices, the first step."""

    def step(self, record: Record) -> None:
        """The metrics of a logged step."""

    def evaluation(self, step: int, metrics: dict[str, dict[str, float]]) -> None:
        """The metrics of an evaluation: input name → metric → value."""

    def message(self, text: str) -> None:
        """Any other line."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a Jupyter notebook."""
    return Console().is_jupyter


class _Console(Console):
    """A console whose reader may go: a closed pipe or terminal ends no run."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            silence(sys.stderr)

    def on_broken_pipe(self) -> None:
        silence(sys.stderr)


def progress_console() -> Console:
    """A console for progress: stderr; in a notebook stdout, since notebooks show stderr like an error."""
    if in_notebook():
        return Console(file=sys.stdout, force_jupyter=False, force_terminal=False, width=_UNWRAPPED, highlight=False)
    is_terminal, no_color = sys.stderr.isatty(), not use_color(sys.stderr)
    width = None if is_terminal else _UNWRAPPED
    return _Console(
        file=sys.stderr, force_terminal=is_terminal, no_color=no_color, highlight=False, soft_wrap=True, width=width
    )


class ProgressPrinter(Reporter, contextlib.AbstractContextManager["ProgressPrinter"]):
    """Prints a line for each report; on a terminal, with a progress bar below them."""

    def __init__(self) -> None:
        self._console = progress_console()
        self._progress: Progress | None = None

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def start(self, facts: dict[str, Any]) -> None:
        """Prints sizes and devices, and on a terminal starts the progress bar."""
        tokens, peak = facts["tokens_per_step"], facts["peak_flops_per_device"]
        first, last = facts["first_step"], facts["num_train_steps"]
        parts = [
            f"{facts['parameters']:,} parameters",
            f"global batch {facts['global_batch_size']:,}" + (f" = {tokens:,} tokens" if tokens else ""),
            f"{facts['devices']} as {facts['mesh']}" + (f", {peak / 1e12:,.0f} TFLOP/s each" if peak else ""),
            f"data seed {facts['data_seed']}",
            f"steps {first} → {last}",
        ]
        self.message(" · ".join(parts))
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("compiling", total=last, completed=first)
            self._progress.start()

    def step(self, record: Record) -> None:
        """Prints a logged step."""
        values = record.values
        fields = [f"step {record.step}", f"loss {values['loss']:.4f}"]
        if values.get("log_pplx") not in (None, values["loss"]):
            fields.append(f"log_pplx {values['log_pplx']:.4f}")
        fields.append(f"learning_rate {values['learning_rate']:.2e}")
        if values["tokens_per_second"] is not None:
            fields.append(f"tokens/s {values['tokens_per_second']:,.0f}")
        if values["mfu"] is not None:
            fields.append(f"MFU {values['mfu']:.1%}")
        if values["skipped_steps"]:
            fields.append(f"skipped {values['skipped_steps']}")
        left = _duration(values["seconds_left"])
        self.message(" · ".join([*fields, f"left {left}"]))
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, description=f"step {record.step}, {left} left")

    def evaluation(self, step: int, metrics: dict[str, dict[str, float]]) -> None:
        """Prints a line for each evaluation input."""
        for name, values in metrics.items():
            self.message(f"step {step} · eval {name} · {values_text(values)}")

    def message(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    days, rest = divmod(round(seconds), 86_400)
    return f"{days} d {rest // 3600} h" if days else time.strftime("%H:%M:%S", time.gmtime(rest))
