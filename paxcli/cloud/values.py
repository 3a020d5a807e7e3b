"""What may be put into a command line: names, zones, labels and the like, each checked before any command is made."""

from __future__ import annotations

import re

from paxcli.errors import ConfigError

_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_PATH = r"[a-zA-Z0-9][-a-zA-Z0-9_./:]{0,254}"
_DURATION = r"([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?"
_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?(Z|[+-][0-9]{2}:[0-9]{2})"

# What each value is: the pattern it matches whole, and how that is said.
_RULES = {
    "name": (_NAME, "1 to 63 lower-case letters, digits and `-`; it starts with a letter and ends with no `-`"),
    "zone": (r"[a-z]+(-[a-z]+)+[0-9]+-[a-z0-9]{1,4}", "a zone is called like us-central2-b"),
    "project": (r"([a-z][-a-z0-9.]{0,60}:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", "a project's id is called like my-project-1"),
    "network": (_PATH, "a name, or projects/…/global/networks/…"),
    "subnetwork": (_PATH, "a name, or projects/…/regions/…/subnetworks/…"),
    "service account": (
        r"default|[-a-z0-9.]{1,63}@[-a-z0-9.]{1,253}",
        "an address like me@my-project.iam.gserviceaccount.com",
    ),
    "runtime version": (r"[a-z0-9][-a-z0-9._]{0,62}", "a version is called like tpu-ubuntu2204-base"),
    "job": (r"[a-z0-9][-a-z0-9]{0,62}", "a job is called like train-20260131-120000"),
    "image": (r"[a-zA-Z0-9][-a-zA-Z0-9_./:@]{0,254}", "an image is called like us-docker.pkg.dev/p/r/pax:1"),
    "git reference": (r"[a-zA-Z0-9][-a-zA-Z0-9_./]{0,127}", "a branch, tag or commit"),
    "git address": (r"https://[-a-zA-Z0-9_./~]{1,250}", "an address like https://example.com/pax.git"),
    # Some versions of scp let the other side's shell read the path.
    "remote path": (r"[a-zA-Z0-9_./~][-a-zA-Z0-9_./~]{0,1023}", "letters, digits and -_./~ only"),
    "port": (r"[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?", "PORT, or HERE:THERE such as 8080:6006"),
    "version": (r"[0-9][a-z0-9.+!]{0,62}", "a version is called like 0.1.0"),
}
_LABEL_KEY, _LABEL_VALUE = r"[a-z][-_a-z0-9]{0,62}", r"[-_a-z0-9]{0,63}"
_SHOWN = 40


def check(kind: str, value: str) -> str:
    """`value`, when it is a valid one of its `kind` (see `_RULES`).

    Raises:
      ConfigError: It is not.
    """
    pattern, rule = _RULES[kind]
    if not re.fullmatch(pattern, value, re.ASCII):
        shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "…"
        raise ConfigError(f"{shown!r} is no {kind}.", f"It must be: {rule}.")
    return value


def check_resource_name(name: str, slices: int = 1) -> str:
    """The name of a TPU; those of several slices end in `-0`, `-1`, …, and have to stay short enough."""
    check("name", name)
    if slices > 1 and len(f"{name}-{slices - 1}") > 63:
        raise ConfigError(f"{name!r} is too long for {slices} slices: they are called {name[:8]}…-0 and so on.")
    return name


def check_labels(text: str) -> str:
    """Labels as `key=value,key=value`."""
    for pair in text.split(","):
        key, separator, value = pair.partition("=")
        if not separator or not re.fullmatch(_LABEL_KEY, key) or not re.fullmatch(_LABEL_VALUE, value):
            rule = "key=value,key=value of lower-case letters, digits, `-` and `_`"
            raise ConfigError(f"{pair[:_SHOWN]!r} is no label.", f"Labels are: {rule}.")
    return text


def check_until(text: str) -> tuple[str, str]:
    """When a request expires: ("duration", "6h") or ("time", "2026-01-31T12:00:00Z")."""
    if text and re.fullmatch(_DURATION, text, re.ASCII):
        return "duration", text
    if re.fullmatch(_TIME, text, re.ASCII):
        return "time", text
    raise ConfigError(f"{text[:_SHOWN]!r} is no time.", "Give a duration such as 6h or 1d12h, or 2026-01-31T12:00:00Z.")


def check_worker(text: str) -> tuple[str, str]:
    """Slice and worker of `all`, `3` (of slice 0) or `1.3`, as gcloud's `--node` and `--worker` take them."""
    if text == "all":
        return "all", "all"
    match = re.fullmatch(r"(?:([0-9]{1,4})\.)?([0-9]{1,4}|all)", text, re.ASCII)
    if not match:
        raise ConfigError(
            f"{text[:_SHOWN]!r} is no worker.", "Give SLICE.WORKER such as 1.3, a worker of slice 0, or all."
        )
    return match[1] or "0", match[2]


def seconds(text: str) -> float:
    """A duration such as `90s`, `30m` or `1h30m` in seconds."""
    match = re.fullmatch(_DURATION, text, re.ASCII)
    if not text or not match:
        raise ConfigError(f"{text[:_SHOWN]!r} is no duration.", "It is written like 90s, 30m or 1h30m.")
    parts = [int(part[:-1]) if part else 0 for part in match.groups()]
    return float(sum(part * unit for part, unit in zip(parts, (86_400, 3_600, 60, 1), strict=True)))
