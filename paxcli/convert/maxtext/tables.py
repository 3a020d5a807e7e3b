"""MaxText's keys, their defaults by date and its models, out of the data files of this room."""

from __future__ import annotations

import datetime
import functools
import importlib.resources
from typing import Any

import yaml

FIRST_DAY = datetime.date(2023, 1, 12)


@functools.cache
def _read(name: str) -> dict[Any, Any]:
    return yaml.safe_load((importlib.resources.files("paxcli.convert.maxtext") / "data" / name).read_text("utf-8"))


def timelines() -> dict[str, dict[datetime.date, Any]]:
    """Key -> first day -> default from then on."""
    return _read("defaults.yaml")


def default(key: str, date: datetime.date) -> Any:
    """The default of a key on a day; that of its first day, before."""
    timeline = timelines()[key]
    return timeline[max((day for day in timeline if day <= date), default=min(timeline))]


def aliases() -> dict[str, dict[str, Any]]:
    """Key of another time -> `now`, `values`, `drop`, `first`, `last`."""
    return _read("aliases.yaml")


def models() -> dict[str, dict[str, Any]]:
    """Name of a model -> what its config sets."""
    return _read("models.yaml")


def lives() -> dict[str, dict[str, datetime.date]]:
    """Key, or `key=value` -> `first` day with it, and `last`, the first day without it."""
    former = {key: alias for key, alias in aliases().items() if "last" in alias}
    return {**former, **_read("keys.yaml")["lives"]}


def why_dropped(key: str) -> str | None:
    """Why a key has no place in a recipe; None when it has one, or nobody knows the key."""
    dropped = _read("keys.yaml")["dropped"]
    if key in timelines() or key in _read("keys.yaml")["known"]:
        return None
    return next((why for name, why in dropped.items() if key == name or _begins(key, name)), None)


def _begins(key: str, name: str) -> bool:
    return name.endswith("*") and key.startswith(name[:-1])


def known_keys() -> set[str]:
    """Every key that has a name here."""
    names = _read("keys.yaml")
    exact = {name for name in names["dropped"] if not name.endswith("*")}
    return {*(k for k in timelines() if k[0] != "_"), *aliases(), *names["known"], *exact, *names["lives"]} - {
        key for key in names["lives"] if "=" in key
    }
