"""Commands in a terminal."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence


def run_in_terminal(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command whose stdout is a terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=env) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while chunk := os.read(ours, 4096):
                shown += chunk
        os.close(ours)
        assert process.stderr is not None
        errors = process.stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, shown.decode(), errors.decode())
