"""Validates names, zones, labels and other values before they are used in a command line."""

from __future__ import annotations

import re

from paxcli.errors import ConfigError

_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_PATH = r"[a-zA-Z0-9][-a-zA-Z0-9_./:]{0,254}"
_DURATION = r"([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?"
_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})"

# Kind of value -> the pattern that it must fully match, and a description for error messages.
_RULES = {
    "name": (_NAME, "1 to 63 lower-case letters, digits and `-`, starting with a letter, not ending with `-`"),
    "zone": (r"[a-z]+(-[a-z]+)+[0-9]+-[a-z0-9]{1,4}", "a zone such as us-central2-b"),
    "project": (r"([a-z][-a-z0-9.]{0,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", "a project id such as my-project-1"),
    "network": (_PATH, "a name, or projects/…/global/networks/…"),
    "subnetwork": (_PATH, "a name, or projects/…/regions/…/subnetworks/…"),
    "service account": (
        r"default|[-a-z0-9.]{1,63}@[-a-z0-9.]{1,253}",
        "an address such as me@my-project.iam.gserviceaccount.com",
    ),
    "runtime version": (r"[a-z0-9][-a-z0-9._]{0,62}", "a version such as tpu-ubuntu2204-base"),
    "job": (r"[a-z0-9][-a-z0-9]{0,62}", "a job name such as train-20260131-120000"),
    "image": (r"[a-zA-Z0-9][-a-zA-Z0-9_./:@]{0,254}", "an image such as us-docker.pkg.dev/p/r/pax:1"),
    "git reference": (r"[a-zA-Z0-9][-a-zA-Z0-9_./]{0,127}", "a branch, tag or commit"),
    "git address": (r"https://[-a-zA-Z0-9_./~]{1,250}", "an address such as https://example.com/pax.git"),
    # Some versions of scp pass the path to the remote shell.
    "remote path": (r"[a-zA-Z0-9_./~][-a-zA-Z0-9_./~]{0,1023}", "letters, digits and -_./~ only"),
    "label": (r"[a-z][-_a-z0-9]{0,62}=[-_a-z0-9]{0,63}", "key=value of lower-case letters, digits, `-` and `_`"),
    "port": (r"[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?", "PORT, or LOCAL:REMOTE such as 8080:6006"),
    "version": (r"[0-9][a-z0-9.+!]{0,62}", "a version such as 0.1.0"),
}
_MAX_QUOTED = 40


def check(kind: str, value: str) -> str:
    """Returns `value` if it is valid for its `kind` (see `_RULES`).

    Raises:
      ConfigError: The value is invalid.
    """
    pattern, rule = _RULES[kind]
    if not re.fullmatch(pattern, value, re.ASCII):
        quoted = value if len(value) <= _MAX_QUOTED else value[:_MAX_QUOTED] + "…"
        raise ConfigError(f"{quoted!r} is not a valid {kind}.", f"It must be: {rule}.")
    return value


def check_resource_name(name: str, slices: int = 1) -> str:
    """Checks the name of a TPU. With several slices, their names end in `-0`, `-1`, … and must not be too long."""
    check("name", name)
    if slices > 1 and len(f"{name}-{slices - 1}") > 63:
        hint = f"Shorten it to {62 - len(str(slices - 1))} characters."
        raise ConfigError(f"{name!r} is too long for {slices} slices, which are named {name[:8]}…-0 and so on.", hint)
    return name


def check_until(text: str) -> tuple[str, str]:
    """Parses the expiry of a request: ("duration", "6h") or ("time", "2026-01-31T12:00:00Z")."""
    if text and re.fullmatch(_DURATION, text, re.ASCII):
        return "duration", text
    if re.fullmatch(_TIME, text, re.ASCII):
        return "time", text
    hint = "Use a duration such as 6h or 1d12h, or 2026-01-31T12:00:00Z."
    raise ConfigError(f"{text[:_MAX_QUOTED]!r} is not a time.", hint)


def check_worker(text: str) -> tuple[str, str]:
    """Parses `all`, `3` (of slice 0) or `1.3` into values for gcloud's `--node` and `--worker`."""
    if text == "all":
        return "all", "all"
    match = re.fullmatch(r"(?:([0-9]{1,4})\.)?([0-9]{1,4}|all)", text, re.ASCII)
    if not match:
        hint = "Use SLICE.WORKER such as 1.3, a worker of slice 0, or all."
        raise ConfigError(f"{text[:_MAX_QUOTED]!r} is not a worker.", hint)
    return match[1] or "0", match[2]


def seconds(text: str) -> float:
    """Parses a duration such as `90s`, `30m` or `1h30m` into seconds."""
    match = re.fullmatch(_DURATION, text, re.ASCII)
    if not text or not match:
        raise ConfigError(f"{text[:_MAX_QUOTED]!r} is not a duration.", "Use a duration such as 90s, 30m or 1h30m.")
    parts = [int(part[:-1]) if part else 0 for part in match.groups()]
    return float(sum(part * unit for part, unit in zip(parts, (86_400, 3_600, 60, 1), strict=True)))
