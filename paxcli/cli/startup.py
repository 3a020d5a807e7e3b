"""The entry point of `pax`: restarts with huge pages, which speed up XLA on CPUs, then runs the command line."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from paxcli.cli.interrupts import interrupts

_VERBS = {"train", "eval", "decode"}
_TUNABLE = "glibc.malloc.hugetlb"


def main() -> None:
    """Runs this process's command line and exits."""
    open_closed_streams()
    restart_tuned()
    # Imports and tracing create half a million objects, which Python would scan again and again.
    gc.set_threshold(1_000_000)
    from paxcli.cli.main import main as run_command_line  # after the restart, or it would be imported twice

    run_command_line()


def open_closed_streams() -> None:
    """Opens the standard streams that the caller closed: the next file would get their number, and their output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if vars(sys)[name] is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets `number`, the lowest that is free
            setattr(sys, name, open(number, "w" if number else "r"))


def restart_tuned() -> None:
    """Restarts `pax train`, `eval` and `decode` once, with huge pages, where the system offers them on request.

    XLA on a CPU maps its scratch memory again in every step. With huge pages that takes a few hundred page faults
    instead of a hundred thousand, which saves a quarter of the step. The C library reads this setting only at process
    start. The process starts again before anything slow is imported.
    """
    if not _VERBS.intersection(sys.argv) or not _huge_pages_on_request():
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    sys.stdout.flush()
    sys.stderr.flush()
    interrupts.hold()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _huge_pages_on_request() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return sys.platform == "linux" and setting.exists() and "[madvise]" in setting.read_text()
