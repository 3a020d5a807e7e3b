"""MaxText's keys, their defaults by date, its models, and the text of a Python recipe: the files in `data/`."""

from __future__ import annotations

import datetime
import functools
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"
FIRST_DAY = datetime.date(2023, 1, 12)


@functools.cache
def table(name: str) -> dict[Any, Any]:
    """A table: `keys`, `models`, `blocks`, `remat`, `recipe_keys` or `arrays`; its file describes it."""
    return yaml.safe_load(read_text(f"{name}.yaml"))


def read_text(name: str) -> str:
    """The text of a file in `data/`."""
    return (DATA / name).read_text("utf-8")


def part(name: str) -> Any:
    """A part of `keys.yaml`, which describes it, such as `aliases`, `approximated`, `entries` and `silent`."""
    return table("keys")[name]


def default(key: str, date: datetime.date) -> Any:
    """The default of a key on a day; before the key's first day, the default of that day."""
    return value_on(date, part("defaults")[key])


def value_on(date: datetime.date, value: Any) -> Any:
    """A value on a day, where it may be a mapping of first days to values."""
    if not isinstance(value, dict):
        return value
    return value[max((day for day in value if day <= date), default=min(value))]


def blocks() -> dict[str, dict[str, Any]]:
    """`decoder_block` that pax has -> facts; see the file."""
    return table("blocks")["blocks"]


def lacks(key: str, value: Any) -> str | None:
    """The part that pax lacks of models with a value of a key."""
    found = table("blocks")["lacks"].get(key)
    return found.get(value) if isinstance(found, dict) else found


def with_other_norm_names(block: str) -> list[str]:
    """The other blocks that differ from one in the names of their norms alone."""
    unnamed = {name: {**facts, "norms": None} for name, facts in blocks().items()}
    return [name for name, facts in unnamed.items() if name != block and facts == unnamed[block]]


def turns(block: str) -> list[list[str]] | None:
    """The traits of each layer of a block with interleaved kinds; None = one kind."""
    return blocks().get(block, {}).get("turns")


def choices(block: str) -> dict[str, list[Any]]:
    """Key -> the values that pax has, of keys with other values in MaxText."""
    every = {key: values for keys, values in part("choices") for key in keys}
    return {"decoder_block": list(blocks()), **every, **blocks().get(block, {}).get("choices", {})}


def lives() -> dict[str, dict[str, datetime.date]]:
    """Key, or `key=value` -> `first` day that had it, and `last`, the first day that no longer did."""
    former = {key: alias for key, alias in part("aliases").items() if {"first", "last"} & alias.keys()}
    return {**former, **part("lives")}


def day_of(change: str) -> datetime.date:
    """The first day of a change to MaxText's code that no key shows."""
    return part("changes")[change]


def drop_reason(key: str) -> str | None:
    """Why a key has no equivalent in a recipe; None if it has one, or the key is unknown."""
    dropped = part("dropped")
    if key in part("defaults") or key in part("known"):
        return None
    matching = (why for name, why in dropped.items() if name.endswith("*") and key.startswith(name[:-1]))
    return dropped.get(key) or next(matching, None)


@functools.cache
def known_keys() -> set[str]:
    """Every key in the tables."""
    names = table("keys")
    exact = {name for name in names["dropped"] if not name.endswith("*")}
    every = {*part("defaults"), *names["aliases"], *names["known"], *exact, *names["lives"]}
    return {key for key in every if key[0] != "_" and "=" not in key}
