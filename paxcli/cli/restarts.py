"""`--restarts`: runs a command again after the exit codes that a restart can help with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import typer

from paxcli.log import log
from paxcli.training.signals import stop_signals

_CHILD = "PAX_RESTARTED"  # set in the environment of the process that does the work
_RESTARTABLE = (4, 75)  # of the exit codes; a process that was killed by a signal is restarted too
_LONGEST_PAUSE = 60.0


def keep_restarting(restarts: int, pause: float = 1.0) -> None:
    """Runs this command in a process of its own, and again up to `restarts` times; returns in that process.

    SIGINT, SIGTERM and SIGHUP are passed on, and nothing is restarted after them. Standard output is that of the last
    run, so that `--json` prints one object.

    Args:
      restarts: The most restarts.
      pause: Seconds before the first restart; doubles each time, up to a minute.

    Raises:
      typer.Exit: With the exit code of the last run.
    """
    if _CHILD in os.environ:
        return
    stopped, unsent = threading.Event(), []
    child: subprocess.Popen | None = None

    def forward(received: int, _: object) -> None:
        stopped.set()
        if child is None:
            unsent.append(received)
        else:
            child.send_signal(received)

    for name in stop_signals():
        signal.signal(name, forward)
    for number in range(restarts + 1):
        command = [sys.executable, *sys.orig_argv[1:]]
        child = subprocess.Popen(command, env={**os.environ, _CHILD: "1"}, stdout=subprocess.PIPE, process_group=0)
        while unsent:
            child.send_signal(unsent.pop())
        output, _ = child.communicate()
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        if stopped.is_set() or number == restarts or not (child.returncode < 0 or code in _RESTARTABLE):
            break
        log.info("Exit code %d: restart %d of %d in %g s.", code, number + 1, restarts, pause)
        child = None  # from here on a signal ends the pause, or is passed on to the next run when it has started
        if stopped.wait(pause):
            break
        pause = min(2 * pause, _LONGEST_PAUSE)
    sys.stdout.buffer.write(output)
    raise typer.Exit(code)
