"""Which TPU VMs a NAME stands for. What pax created it remembers; the rest gcloud is asked for.

The memory is one small JSON file a name, in `$XDG_STATE_HOME/pax/targets`: where to look, nothing that could be secret.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

from paxcli.cloud import commands
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud, configured
from paxcli.cloud.states import slices_of
from paxcli.cloud.values import check
from paxcli.errors import ConfigError

_VARIABLES = {
    "zone": ("CLOUDSDK_COMPUTE_ZONE",),
    "project": ("CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_PROJECT"),
}
_SETTINGS = {"zone": "compute/zone", "project": "core/project"}


def find_place(zone: str | None, project: str | None, say: Callable[[str], None]) -> tuple[str, str | None]:
    """Zone and project: from the options, else the environment, else gcloud's configuration; says which was taken.

    Raises:
      ConfigError: No zone is to be found, or a value is not valid.
    """
    found_zone = _place("zone", zone, say)
    if found_zone is None:
        raise ConfigError(
            "No zone is given.",
            "gcloud config set compute/zone us-central2-b, or $CLOUDSDK_COMPUTE_ZONE; `pax provision` takes --zone.",
        )
    return found_zone, _place("project", project, say)


def _place(kind: str, given: str | None, say: Callable[[str], None]) -> str | None:
    if given is not None:
        return check(kind, given)
    sources = [(f"${name}", os.environ.get(name)) for name in _VARIABLES[kind]]
    source, value = next((pair for pair in sources if pair[1]), ("gcloud's configuration", None))
    value = value or configured(_SETTINGS[kind])
    if value:
        say(f"{kind} {check(kind, value)}, from {source}")
    return value


def remember(target: Target) -> None:
    """Keeps where a name is, for `--on NAME`. What cannot be written is asked for again later."""
    try:
        _file(target.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _file(target.name).write_text(json.dumps(dataclasses.asdict(target)))
    except OSError:
        pass


def forget(name: str) -> None:
    """Forgets a name."""
    _file(name).unlink(missing_ok=True)


def recall(name: str) -> Target | None:
    """What is remembered of a name; None when that is nothing, or cannot be read."""
    check("name", name)
    try:
        fields = json.loads(_file(name).read_text())
        return Target(**fields) if fields.get("name") == name else None
    except (OSError, ValueError, TypeError, AttributeError, ConfigError):
        return None


def find_target(
    name: str,
    zone: str | None,
    project: str | None,
    gcloud: Gcloud,
    say: Callable[[str], None],
    dry_run: bool = False,
) -> Target:
    """The TPU VMs of a name: remembered, or looked up as queued resource and as TPU VM; a dry run does not look.

    Raises:
      ConfigError: There are none, or no zone is known.
      RemoteError: gcloud failed.
    """
    known = recall(name)
    if known and zone in (None, known.zone) and project in (None, known.project):
        return known
    zone, project = find_place(zone, project, say)
    queued = Target(name, zone, project, queued=True)
    if dry_run:
        say(f"{name} was not created here; it is taken for a queued resource")
        return queued
    described = gcloud.find(commands.describe(queued))
    if described is not None:
        return dataclasses.replace(queued, slices=slices_of(described))
    single = Target(name, zone, project)
    if gcloud.find(commands.describe(single)) is None:
        hint = f"pax provision list --zone {zone} shows what there is; --zone looks elsewhere."
        raise ConfigError(f"There is neither a queued resource nor a TPU VM {name!r} in {zone}.", hint)
    return single


def _file(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pax" / "targets" / f"{check('name', name)}.json"
