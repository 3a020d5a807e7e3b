"""Captures the log of XLA's C++ code."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from typing import TextIO

# Absl's format, `I1121 02:30:40.859288 19779 file.cc:579] …`, and that of older XLA, `2026-11-21 02:30:40.859288: I …`.
_INFO = re.compile(r"I\d{4} |\d{4}-\d\d-\d\d [\d:.]+: I ")
_MAX_LINES = 10_000


class XlaLog:
    """Captures XLA's INFO messages while entered; everything else still goes to stderr.

    XLA logs INFO messages only if TF_CPP_MIN_LOG_LEVEL is 0 when JAX is imported.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._line_added = threading.Condition()

    def __enter__(self) -> XlaLog:
        self._python = sys.stderr
        self._python.flush()
        terminal = os.dup(2)
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        sys.stderr = open(terminal, "w", buffering=1)  # Python writes to the terminal directly, and sees that it is one
        self._reader = threading.Thread(target=self._read, args=(reading, sys.stderr), name="xla-log", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(sys.stderr.fileno(), 2)
        sys.stderr = self._python
        # A child process may keep the pipe open; the thread then continues to forward its messages.
        self._reader.join(timeout=5)

    def wait_for(self, text: str, seconds: float = 5) -> str | None:
        """The first line that contains `text`; None if there is none within so many seconds."""
        with self._line_added:
            return self._line_added.wait_for(lambda: next((one for one in self._lines if text in one), None), seconds)

    def _read(self, reading: int, terminal: TextIO) -> None:
        with open(reading, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                if _INFO.match(line):
                    with self._line_added:
                        self._lines.append(line.rstrip())
                        self._line_added.notify_all()
                else:
                    print(line, end="", file=terminal)
        terminal.close()
