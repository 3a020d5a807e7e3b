"""Every failure that a user can cause: its cause, its next step, its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PaxError(Exception):
    """A failure with a cause and a next step. The base class itself stands for our own bugs.

    Args:
      message: The cause, in one or two sentences.
      hint: What to do next, often a command to type.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PaxError):
    """Wrong usage or configuration: starting again without a change cannot help."""

    exit_code = 2


class MissingError(PaxError):
    """Something that this machine lacks: a package, a device, permission, space."""

    exit_code = 3


class RemoteError(PaxError):
    """A remote or cloud command failed."""

    exit_code = 4


class DataError(PaxError):
    """Data or a checkpoint that cannot be used."""

    exit_code = 5


class DivergedError(PaxError):
    """Training produced a loss that is not finite."""

    exit_code = 6


class Stopped(PaxError):
    """A signal stopped the run after its state was saved: start it again."""

    exit_code = 75


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to what fits on a screen; its type's name where it has no text."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:200]


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The up to `n` of `names` most like `name`, best first; case and `-`/`_` do not count."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "-")

    spelled: dict[str, list[str]] = {}
    for candidate in names:
        spelled.setdefault(plain(candidate), []).append(candidate)
    close = difflib.get_close_matches(plain(name), spelled, n=n, cutoff=0.5)
    return [candidate for key in close for candidate in spelled[key]][:n]


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """A hint that names what `name` may have been meant to be, or None when nothing is near."""
    close = nearest(name, names)
    return f"Did you mean {', '.join(f'`{candidate}`' for candidate in close)}?" if close else None
