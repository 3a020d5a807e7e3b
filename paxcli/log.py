"""The logger, and whether a stream takes colors. Logs and progress go to stderr, results to stdout."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

log = logging.getLogger("pax")


def setup_logging() -> None:
    """Logs pax's messages to stderr, one line each. Libraries log warnings and errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)


def silence(stream: TextIO) -> None:
    """Drops all that is written to `stream` from here on: its reader, a pipe or a terminal, is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def use_color(stream: TextIO) -> bool:
    """Whether control codes may be written to `stream`: it is a terminal, and `NO_COLOR` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
