"""MaxText's keys, their defaults by date, its models, and the text of a Python recipe: the files in `data/`."""

from __future__ import annotations

import datetime
import functools
import importlib.resources
from typing import Any

import yaml

FIRST_DAY = datetime.date(2023, 1, 12)


@functools.cache
def _read(name: str) -> dict[Any, Any]:
    return yaml.safe_load(read_text(name))


def read_text(name: str) -> str:
    """The text of a file in `data/`."""
    return (importlib.resources.files("paxcli.convert.maxtext") / "data" / name).read_text("utf-8")


def timelines() -> dict[str, dict[datetime.date, Any]]:
    """Key -> first day -> default value from that day on."""
    return _read("keys.yaml")["defaults"]


def part(name: str) -> Any:
    """A part of `keys.yaml`, which describes it, such as `aliases`, `approximated`, `entries` and `silent`."""
    return _read("keys.yaml")[name]


def default(key: str, date: datetime.date) -> Any:
    """The default of a key on a day; before the key's first day, the default of that day."""
    return value_on(date, timelines()[key])


def value_on(date: datetime.date, value: Any) -> Any:
    """A value on a day, where it may be a mapping of first days to values."""
    if not isinstance(value, dict):
        return value
    return value[max((day for day in value if day <= date), default=min(value))]


def blocks() -> dict[str, dict[str, Any]]:
    """`decoder_block` that pax has -> facts; see the file."""
    return _read("blocks.yaml")["blocks"]


def lacks(key: str, value: Any) -> str | None:
    """The part that pax lacks of models with a value of a key."""
    found = _read("blocks.yaml")["lacks"].get(key)
    return found.get(value) if isinstance(found, dict) else found


def with_other_norm_names(block: str) -> list[str]:
    """The other blocks that differ from one in the names of their norms alone."""
    unnamed = {name: {**facts, "norms": None} for name, facts in blocks().items()}
    return [name for name, facts in unnamed.items() if name != block and facts == unnamed[block]]


def turns(block: str) -> list[list[str]] | None:
    """The traits of each layer of a block with interleaved kinds; None = one kind."""
    return blocks().get(block, {}).get("turns")


def recipe_keys() -> dict[str, list[Any]]:
    """Path of a recipe -> the key with the same value, and the key's value where the recipe has null."""
    return _read("recipe_keys.yaml")


def choices(block: str) -> dict[str, list[Any]]:
    """Key -> the values that pax has, of keys with other values in MaxText."""
    every = {key: values for keys, values in _read("keys.yaml")["choices"] for key in keys}
    return {"decoder_block": list(blocks()), **every, **blocks().get(block, {}).get("choices", {})}


def remat() -> dict[str, dict[str, Any]]:
    """`policies` of MaxText -> pax's policy, offloaded activations, difference; and what policies save on device.

    `activations`: pax's name of each -> MaxText's.
    """
    return _read("remat.yaml")


def models() -> dict[str, dict[str, Any]]:
    """Name of a model -> the keys that its config sets: a value, or first day -> value."""
    return _read("models.yaml")


def lives() -> dict[str, dict[str, datetime.date]]:
    """Key, or `key=value` -> `first` day that had it, and `last`, the first day that no longer did."""
    former = {key: alias for key, alias in part("aliases").items() if {"first", "last"} & alias.keys()}
    return {**former, **_read("keys.yaml")["lives"]}


def day_of(change: str) -> datetime.date:
    """The first day of a change to MaxText's code that no key shows."""
    return _read("keys.yaml")["changes"][change]


def drop_reason(key: str) -> str | None:
    """Why a key has no equivalent in a recipe; None if it has one, or the key is unknown."""
    dropped = _read("keys.yaml")["dropped"]
    if key in timelines() or key in _read("keys.yaml")["known"]:
        return None
    matching = (why for name, why in dropped.items() if name.endswith("*") and key.startswith(name[:-1]))
    return dropped.get(key) or next(matching, None)


@functools.cache
def known_keys() -> set[str]:
    """Every key in the tables."""
    names = _read("keys.yaml")
    exact = {name for name in names["dropped"] if not name.endswith("*")}
    every = {*timelines(), *names["aliases"], *names["known"], *exact, *names["lives"]}
    return {key for key in every if key[0] != "_" and "=" not in key}
