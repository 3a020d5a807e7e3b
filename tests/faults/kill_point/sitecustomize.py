"""Kills the process with SIGKILL at the n-th file operation on a path that contains a text; see `processes.killed_at`.

Python imports this file at its start, when its folder is on PYTHONPATH. Operations: opening for writing, making a
directory, removing, before and after a rename, fsync.
"""

from __future__ import annotations

import json
import os
import signal
import sys

if "KILL_POINT" in os.environ:
    match, left = json.loads(os.environ["KILL_POINT"])
    rename, replace, fsync = os.rename, os.replace, os.fsync

    def reach(*paths: object) -> None:
        """Counts an operation, and dies at the n-th."""
        global left
        if any(isinstance(path, str | os.PathLike) and match in os.fspath(path) for path in paths):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def observe(event: str, arguments: tuple) -> None:
        """An audit hook."""
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            reach(arguments[0])
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            reach(*arguments[:2])

    def then_reach(function):
        def call(source, target, **options):
            function(source, target, **options)
            reach(source, target)

        return call

    def reach_and_sync(file) -> None:
        reach(os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
        fsync(file)

    os.rename, os.replace, os.fsync = then_reach(rename), then_reach(replace), reach_and_sync
    sys.addaudithook(observe)
