"""What XLA's C++ side logs."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from typing import TextIO

# Absl's form, `I1121 02:30:40.859288 19779 file.cc:579] …`, and that of older XLA, `2026-11-21 02:30:40.859288: I …`.
_INFO = re.compile(r"I\d{4} |\d{4}-\d\d-\d\d [\d:.]+: I ")
_KEPT = 10_000


class XlaLog:
    """While entered, keeps XLA's information to itself; all else goes to stderr as ever.

    XLA speaks at all only where TF_CPP_MIN_LOG_LEVEL is 0 when JAX is imported.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._heard = threading.Condition()

    def __enter__(self) -> XlaLog:
        self._python = sys.stderr
        self._python.flush()
        terminal = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        sys.stderr = open(terminal, "w", buffering=1)  # Python's own messages take no detour, and see the terminal
        self._reader = threading.Thread(target=self._read, args=(reading, sys.stderr), name="xla-log", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(sys.stderr.fileno(), 2)
        sys.stderr = self._python
        # A process that was started meanwhile may hold the pipe open: its messages still pass through the thread.
        self._reader.join(timeout=5)

    def wait_for(self, text: str, seconds: float = 5) -> str | None:
        """The first line with `text`, which may still be on its way; None when there is none."""

        def found() -> str | None:
            return next((line for line in self._lines if text in line), None)

        with self._heard:
            return self._heard.wait_for(found, timeout=seconds)

    def _read(self, reading: int, terminal: TextIO) -> None:
        with open(reading, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                if _INFO.match(line):
                    with self._heard:
                        self._lines.append(line.rstrip())
                        self._heard.notify_all()
                else:
                    print(line, end="", file=terminal)
        terminal.close()
