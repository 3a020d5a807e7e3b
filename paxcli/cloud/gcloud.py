"""Runs the user's `gcloud`: time limits, another try where that can help, and failures that name their likely cause."""

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

_CHATTER = (
    "WARNING",
    "Using ssh batch",
    "SSH: ",
    "Completed execution",
    "SCP: ",
    "Updating ",
    "Propagating",
    "Warning:",
)
_TRANSIENT = re.compile(
    r"UNAVAILABLE|\b50[0234]\b|\b429\b|rateLimitExceeded|DEADLINE_EXCEEDED|backendError|Internal error encountered"
    r"|connection (was )?(reset|aborted|refused|timed out|closed)|temporarily unavailable"
    r"|Temporary failure|return code \[255\]",
    re.IGNORECASE,
)
# Likely causes, the more special ones first; a hint may name the zone with {zone}.
_CAUSES = (
    (
        r"SERVICE_DISABLED|has not been used in project|API .*(not enabled|disabled)",
        "The Cloud TPU API is off in this project: gcloud services enable tpu.googleapis.com",
    ),
    (
        r"Reauthentication|invalid_grant|do not currently have an active account|gcloud auth login",
        "Log in again: gcloud auth login",
    ),
    (
        r"quota|limit .*exceeded|QUOTA_EXCEEDED",
        "The project's quota does not reach: see the page Quotas of the Google Cloud console, ask for more, or take "
        "fewer chips. Spot and reserved chips have quotas of their own.",
    ),
    (
        r"no more capacity|not enough resources|stockout|RESOURCE_EXHAUSTED|capacity",
        "The zone has no free chips now: wait in line with --queued, try --spot or another zone.",
    ),
    (
        r"accelerator.?type|AcceleratorType",
        "The zone may not offer this type: gcloud compute tpus accelerator-types list --zone={zone}",
    ),
    (
        r"runtime.?version|RuntimeVersion",
        "The zone may not offer this software: gcloud compute tpus versions list --zone={zone}",
    ),
    (
        r"PERMISSION_DENIED|\b403\b|does not have permission|Required .* permission|required permission",
        "The account lacks a permission, often the role TPU Admin (roles/tpu.admin), or the project is another: "
        "gcloud auth list, gcloud config list",
    ),
    (r"ALREADY_EXISTS|already exists", "There is one of this name: pax provision describe NAME, or take another name."),
    (
        r"NOT_FOUND|\b404\b|not found|Unknown zone|zone.* (is )?(not|in)valid|Permission denied on .locations/",
        "Nothing is there by this name. See the zone and the project: pax provision list --zone ZONE",
    ),
    (
        r"Could not (add|fetch) SSH|publickey|\[255\]|return code 255|timed out",
        "The machine cannot be reached with ssh: is it READY, and does a firewall let port 22 in?",
    ),
)


class Gcloud:
    """The user's gcloud.

    Args:
      sleep: Waits; tests give another.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep):
        self.sleep = sleep

    def run(self, argv: Sequence[str], timeout: float = 300, tries: int = _TRIES) -> str:
        """Runs one command and returns its stdout.

        Args:
          argv: From `commands.py`.
          timeout: Seconds for one try.
          tries: How often in all, where the failure is one that passes. 1 for what must not happen twice.

        Raises:
          MissingError: There is no gcloud.
          RemoteError: It failed. The message is gcloud's own, the hint its likely cause.
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
                raise RemoteError(f"{_shown(argv)} gave no answer in {timeout:.0f} s.", hint) from None
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
            raise RemoteError(
                f"{_shown(argv)} printed no JSON: {output[:200]!r}.", "gcloud components update"
            ) from None

    def find(self, argv: Sequence[str]) -> Any | None:
        """Like `json`, and None when what is asked for does not exist."""
        try:
            return self.json(argv)
        except RemoteError as error:
            if re.search(r"NOT_FOUND|\b404\b|was not found", error.message):
                return None
            raise


def find_gcloud() -> str:
    """The path of gcloud.

    Raises:
      MissingError: It is not on PATH.
    """
    program = shutil.which("gcloud")
    if program is None:
        raise MissingError("gcloud is not on this machine.", f"Install it: {INSTALL}, then: gcloud auth login")
    return program


def failure(argv: Sequence[str], returncode: int, stderr: str) -> RemoteError:
    """What to say of a failed gcloud: the last lines of its own words, and the likely cause."""
    lines = [line for line in stderr.strip().splitlines() if line.strip() and not line.startswith(_CHATTER)]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR")), len(lines))
    # Before gcloud's own words stand those of a script that it ran.
    message = "\n".join(lines[max(0, first - 6) : first + 8]) or f"exit status {returncode}"
    zone = next((item.partition("=")[2] for item in argv if item.startswith("--zone=")), "ZONE")
    hint = next((hint for pattern, hint in _CAUSES if re.search(pattern, message, re.IGNORECASE)), None)
    return RemoteError(f"{_shown(argv)} failed: {message}", hint and hint.format(zone=zone))


def pause(attempt: int) -> float:
    """Seconds before the next try: anywhere up to a limit that doubles, so that many callers do not return at once."""
    return random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))


def configured(setting: str) -> str | None:
    """A value out of gcloud's own configuration, such as `compute/zone`; None without gcloud or value."""
    program = shutil.which("gcloud")
    if program is None:
        return None
    argv = [program, "config", "get-value", setting, "--quiet"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None


def _shown(argv: Sequence[str]) -> str:
    """The words of a command without its options: scripts are long."""
    words = [item for item in argv if not item.startswith("-")]
    return " ".join(words[:6])
