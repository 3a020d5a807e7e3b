"""Finds the target of a NAME: remembered if pax created it, otherwise looked up with gcloud.

pax remembers one small JSON file per name in `$XDG_STATE_HOME/pax/targets`: zone, project and type, no secrets.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paxcli.cloud import commands
from paxcli.cloud.accelerators import find_accelerator
from paxcli.cloud.commands import Target
from paxcli.cloud.gcloud import Gcloud, read_setting
from paxcli.cloud.states import nodes_of, types_of
from paxcli.cloud.values import check
from paxcli.errors import ConfigError

_VARIABLES = {"zone": ("CLOUDSDK_COMPUTE_ZONE",), "project": ("CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_PROJECT")}
_SETTINGS = {"zone": "compute/zone", "project": "core/project"}


def find_zone_and_project(zone: str | None, project: str | None, say: Callable[[str], None]) -> tuple[str, str | None]:
    """Zone and project from the options, the environment or gcloud's configuration; reports the source.

    Raises:
      ConfigError: No zone is set, or a value is invalid.
    """
    found_zone = _find_setting("zone", zone, say)
    if found_zone is None:
        raise ConfigError(
            "No zone is set.",
            "Use `gcloud config set compute/zone us-central2-b`, $CLOUDSDK_COMPUTE_ZONE, or --zone of `pax provision`.",
        )
    return found_zone, _find_setting("project", project, say)


def _find_setting(kind: str, option: str | None, say: Callable[[str], None]) -> str | None:
    if option is not None:
        return check(kind, option)
    variable = next((name for name in _VARIABLES[kind] if os.environ.get(name)), None)
    value = os.environ[variable] if variable else read_setting(_SETTINGS[kind])
    if value:
        source = f"${variable}" if variable else "gcloud's configuration"
        say(f"{kind} {check(kind, value)}, from {source}")
    return value


def remember(target: Target) -> None:
    """Remembers a target for `--on NAME`. If the file cannot be written, the target is looked up again later."""
    try:
        _file(target.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _file(target.name).write_text(json.dumps(dataclasses.asdict(target)))
    except OSError:
        pass


def forget(target: Target) -> None:
    """Forgets a target. One of the same name in another zone or project stays remembered."""
    known = recall(target.name)
    if known is not None and known.location_options() == target.location_options():
        _file(target.name).unlink(missing_ok=True)


def recall(name: str) -> Target | None:
    """The remembered target of a name; None if there is none or its file is unreadable."""
    check("name", name)
    try:
        fields = json.loads(_file(name).read_text())
        return Target(**fields) if fields.get("name") == name else None
    except (OSError, ValueError, TypeError, AttributeError, ConfigError):
        return None


def find_target(
    name: str, zone: str | None, project: str | None, gcloud: Gcloud, say: Callable[[str], None], dry_run: bool = False
) -> Target:
    """The target of a name: remembered, or looked up as a queued resource and as a TPU VM.

    A dry run does not look it up, and assumes a queued resource.

    Raises:
      ConfigError: There is no such target, or no zone is set.
      RemoteError: gcloud failed.
    """
    known = recall(name)
    if known and zone in (None, known.zone) and project in (None, known.project):
        return known
    zone, project = find_zone_and_project(zone, project, say)
    queued = Target(name, zone, project, queued=True)
    if dry_run:
        say(f"{name} was not created on this machine; assuming a queued resource")
        return queued
    described = gcloud.find(commands.describe(queued))
    if described is not None:
        return dataclasses.replace(queued, slices=len(nodes_of(described, name)), accelerator=_known_type(described))
    single = Target(name, zone, project)
    described = gcloud.find(commands.describe(single))
    if described is None:
        hint = f"List the zone's resources: pax provision list --zone {zone}. For another zone, pass --zone."
        raise ConfigError(f"There is neither a queued resource nor a TPU VM {name!r} in {zone}.", hint)
    return dataclasses.replace(single, accelerator=_known_type(described))


def _known_type(described: Mapping[str, Any]) -> str | None:
    """The accelerator type of all slices; None if Google names none, or one that pax does not know."""
    try:
        (found,) = types_of(described)
        return find_accelerator(found).type
    except (ValueError, ConfigError):
        return None


def _file(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pax" / "targets" / f"{check('name', name)}.json"
