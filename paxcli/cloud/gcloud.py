"""Runs `gcloud` with timeouts, retries of transient failures, and errors that name the likely cause."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from paxcli.errors import MissingError, RemoteError

INSTALL = "https://cloud.google.com/sdk/docs/install"
_TRIES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 30.0

_CHATTER = re.compile("WARNING|Warning:|Using ssh batch|SSH: |SCP: |Completed execution|Updating |Propagating")
_TRANSIENT = re.compile(
    r"UNAVAILABLE|\b50[0234]\b|\b429\b|rateLimitExceeded|DEADLINE_EXCEEDED|backendError|Internal error encountered"
    r"|connection (was )?(reset|aborted|refused|timed out|closed)|temporarily unavailable"
    r"|Temporary failure|return code \[255\]",
    re.IGNORECASE,
)
# Patterns of error messages and their hints, the most specific first; {zone} is replaced by the zone.
_CAUSES = (
    (
        r"SERVICE_DISABLED|has not been used in project|API .*(not enabled|disabled)",
        "The Cloud TPU API is disabled in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        r"Reauthentication|invalid_grant|do not currently have an active account|gcloud auth login",
        "Log in again: gcloud auth login",
    ),
    (
        r"quota|limit .*exceeded|QUOTA_EXCEEDED",
        "The project's quota is too small: see the Quotas page of the Google Cloud console, request more, or use "
        "fewer chips. Spot and reserved chips have separate quotas.",
    ),
    (
        r"no more capacity|not enough resources|stockout|RESOURCE_EXHAUSTED|capacity",
        "The zone has no free chips now: request a queued resource with --queued, or try --spot or another zone.",
    ),
    (
        r"accelerator.?type|AcceleratorType",
        "The zone may not offer this type: gcloud compute tpus accelerator-types list --zone={zone}",
    ),
    (
        r"runtime.?version|RuntimeVersion",
        "The zone may not offer this runtime version: gcloud compute tpus versions list --zone={zone}",
    ),
    (
        r"PERMISSION_DENIED|\b403\b|does not have permission|Required .* permission|required permission",
        "The account lacks a permission, often the role TPU Admin (roles/tpu.admin), or the project is wrong: "
        "gcloud auth list, gcloud config list",
    ),
    (r"ALREADY_EXISTS|already exists", "The name is in use: pax provision describe NAME, or choose another name."),
    (
        r"NOT_FOUND|\b404\b|not found|Unknown zone|zone.* (is )?(not|in)valid|Permission denied on .locations/",
        "No TPU VM or queued resource has this name. Check the zone and the project: pax provision list --zone {zone}",
    ),
    (
        r"Could not (add|fetch) SSH|publickey|\[255\]|return code 255|timed out",
        "The machine cannot be reached with ssh: is it READY, and does the firewall allow port 22?",
    ),
)


class Gcloud:
    """The user's gcloud.

    Args:
      sleep: Sleeps for some seconds; tests replace it.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep):
        self.sleep = sleep

    def run(self, argv: Sequence[str], timeout: float = 300, tries: int = _TRIES) -> str:
        """Runs one command and returns its stdout.

        Args:
          argv: A command of `commands.py`.
          timeout: Seconds for one attempt.
          tries: Maximum number of attempts if a failure is transient. 1 for commands that must not run twice.

        Raises:
          MissingError: gcloud is not installed.
          RemoteError: The command failed. The message is gcloud's, the hint its likely cause.
        """
        program = find_gcloud()
        for attempt in range(1, tries + 1):
            try:
                done = subprocess.run(
                    [program, *argv[1:]],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout,
                )
            except subprocess.TimeoutExpired:
                hint = "Try again; `gcloud info --run-diagnostics` tests the connection."
                raise RemoteError(f"{_short_command(argv)} timed out after {timeout:.0f} s.", hint) from None
            except OSError as error:
                hint = f"Install gcloud again: {INSTALL}"
                raise MissingError(f"{program} cannot be started: {error.strerror}.", hint) from None
            if done.returncode == 0:
                return done.stdout
            if attempt == tries or not _TRANSIENT.search(done.stderr):
                raise failure(argv, done.returncode, done.stderr)
            self.sleep(pause(attempt))
        raise AssertionError("unreachable")

    def json(self, argv: Sequence[str], timeout: float = 120) -> Any:
        """Runs a command that prints JSON."""
        output = self.run(argv, timeout)
        try:
            return json.loads(output)
        except json.JSONDecodeError:
            hint = "gcloud components update"
            raise RemoteError(f"{_short_command(argv)} did not print JSON: {output[:200]!r}.", hint) from None

    def find(self, argv: Sequence[str]) -> Any | None:
        """Like `json`, or None if the resource does not exist."""
        try:
            return self.json(argv)
        except RemoteError as error:
            if is_not_found(error):
                return None
            raise


def is_not_found(error: RemoteError) -> bool:
    """Whether gcloud failed because the resource does not exist."""
    return re.search(r"NOT_FOUND|(?<!-)\b404\b|was not found", error.message) is not None  # not a name such as run-404


def find_gcloud() -> str:
    """The path of gcloud.

    Raises:
      MissingError: gcloud is not on PATH.
    """
    program = shutil.which("gcloud")
    if program is None:
        hint = f"Install it: {INSTALL}, then: gcloud auth login"
        raise MissingError("gcloud is not installed on this machine.", hint)
    return program


def failure(argv: Sequence[str], returncode: int, stderr: str) -> RemoteError:
    """The error for a failed gcloud command: the relevant lines of its stderr, and the likely cause as hint."""
    lines = [line for line in stderr.strip().splitlines() if line.strip() and not _CHATTER.match(line)]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR")), len(lines))
    # The output of a remote script comes before gcloud's own message.
    message = "\n".join(lines[max(0, first - 6) : first + 8]) or f"exit status {returncode}"
    zone = next((item.partition("=")[2] for item in argv if item.startswith("--zone=")), "ZONE")
    hint = next((hint for pattern, hint in _CAUSES if re.search(pattern, message, re.IGNORECASE)), None)
    return RemoteError(f"{_short_command(argv)} failed: {message}", hint and hint.format(zone=zone))


def pause(attempt: int) -> float:
    """Seconds to wait before the next attempt: exponential backoff with full jitter."""
    return random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))


def read_setting(setting: str) -> str | None:
    """A value of gcloud's configuration, such as `compute/zone`; None if it is unset or gcloud is not installed."""
    if shutil.which("gcloud") is None:
        return None
    try:
        return Gcloud().run(["gcloud", "config", "get-value", setting, "--quiet"], 60, tries=1).strip() or None
    except RemoteError:
        return None


def _short_command(argv: Sequence[str]) -> str:
    """The first words of a command, without its options, which may contain a long script."""
    words = [item for item in argv if not item.startswith("-")]
    return " ".join(words[:6])
