"""pax's logger. Logs and progress go to stderr, results to stdout."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("pax")


def setup_logging(verbose: bool = False) -> None:
    """Logs pax's messages to stderr, one line each. Libraries log warnings and errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
