"""Typed errors for failures that a user can cause: message, hint and exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_MACHINE_FAULTS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EFBIG: "a file exceeds the limit of its size (`ulimit -f`)",
    errno.EIO: "the disk fails",
    errno.EMFILE: "this process may open no more files (`ulimit -n`)",
    errno.ENOMEM: "no memory is left, or its limit (`ulimit -v`) is reached",
}


class PaxError(Exception):
    """A failure with a message and a hint. The base class itself (exit code 1) is a bug in pax.

    Args:
      message: The cause, in one or two sentences.
      hint: What to do next, often a command to type.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # tracebacks show it, in notebooks too


class ConfigError(PaxError):
    """Wrong usage or configuration. Restarting without a change does not help."""

    exit_code = 2


class MeshError(ConfigError):
    """A mesh axis does not divide a size of the model, or the batch."""


class MissingError(PaxError):
    """This machine lacks something: a package, a device, a permission, disk space."""

    exit_code = 3


class RemoteError(PaxError):
    """A remote or cloud command failed."""

    exit_code = 4


class DataError(PaxError):
    """Data or a checkpoint is missing, damaged or incompatible."""

    exit_code = 5


class DivergedError(PaxError):
    """The training loss is NaN or infinite."""

    exit_code = 6


class Stopped(PaxError):
    """A signal, a hang or the loss of another process stopped the run. Restart it to resume."""

    exit_code = 75


def exit_now(error: Exception) -> NoReturn:  # pyrefly: ignore[bad-return]
    """Reports an error and ends the process, from any thread, without the usual clean-up, which may never return."""
    exit_code = error.exit_code if isinstance(error, PaxError) else PaxError.exit_code
    try:
        exit_code = report_exit(error)
    finally:
        os._exit(exit_code)


def _print_error(error: Exception) -> int:
    if not isinstance(error, PaxError):
        traceback.print_exception(error)
        return PaxError.exit_code
    print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr, flush=True)
    return error.exit_code


report_exit: Callable[[Exception], int] = _print_error  # returns the exit code; the command line sets its own


def load_library(name: str, problem: str) -> Any:
    """Imports a package that only some data needs. Raises MissingError with `problem` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingError(problem, f"pip install {name}") from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, of at most 200 characters; the type's name if the message is empty."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 200 else line[:199] + "…"


def machine_fault(error: BaseException | None) -> str | None:
    """The machine's fault that made a file operation fail, such as a full disk; None for any other error."""
    while error is not None:
        for number, fault in _MACHINE_FAULTS.items():
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return fault
        error = error.__cause__ or error.__context__
    return None


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` of `names` closest to `name`, best first. Ignores case and the difference between `-` and `_`."""

    def normalize(text: str) -> str:
        return text.lower().replace("_", "-")

    spellings: dict[str, list[str]] = {}
    for candidate in names:
        spellings.setdefault(normalize(candidate), []).append(candidate)
    close = difflib.get_close_matches(normalize(name), spellings, n=n, cutoff=0.5)
    return [candidate for key in close for candidate in spellings[key]][:n]


def names_hint(name: str, names: Iterable[str]) -> str:
    """A hint with the names closest to `name`, or with all names if none is close."""
    return did_you_mean(name, names) or f"Use one of {', '.join(names)}."


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """A hint with the names closest to `name`, or None if there are none."""
    close = ", ".join(f"`{candidate}`" for candidate in nearest(name, names))
    return f"Did you mean {close}?" if close else None
