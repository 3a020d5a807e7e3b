"""A line on stderr while something slow runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Console]:
    """Prints `text` to stderr, on a terminal with the time elapsed. Yields the console, to print other lines."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from paxcli.training.progress import progress_console

    console = progress_console()
    if not sys.stderr.isatty():
        console.print(text, markup=False)
        yield console
        return
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield console
