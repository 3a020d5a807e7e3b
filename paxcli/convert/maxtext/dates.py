"""Infers the date of a launch from its keys: the defaults of MaxText changed over time."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection

from paxcli.convert.maxtext.launch import Launch
from paxcli.convert.maxtext.tables import FIRST_DAY, day_of, lives, part

# The last day that the tables cover.
LAST_DAY = datetime.date(2026, 8, 22)

_HARMLESS = ("attention", "dataset_type", "dataset_name", "add_bos", "load_balance_loss_weight", "log_period", "_flops")
_OF_EXPERTS = ("base_moe_mlp_dim", "shared_experts")


@dataclasses.dataclass(frozen=True)
class Era:
    """The days on which a launch may have been written.

    Attributes:
      first: The first.
      last: The last, included, whose defaults apply.
      source: How they are known, as the end of a text.
      open_keys: Keys without a value in the launch whose defaults changed between these days.
    """

    first: datetime.date
    last: datetime.date
    source: str
    open_keys: tuple[str, ...] = ()

    def text(self) -> str:
        """A description for the report."""
        days = f"{self.first} to {self.last}" if self.first != self.last else str(self.first)
        return f"{days}{self.source}"


def era_of(launch: Launch, given: Collection[str], date: datetime.date | None = None) -> Era:
    """When a launch was written.

    Args:
      launch: The launch.
      given: Keys that have values, whose defaults do not matter. A `decoder_block` implies its kind of positions.
      date: Given by the user; overrides the rest.
    """
    given = {*given, "_position"} if "decoder_block" in given else given
    if date is not None:
        return Era(date, date, ", as given")
    hints = _hints(launch)
    came = [(FIRST_DAY, ""), *((day, name) for name, day, _ in hints if day is not None)]
    went = [(LAST_DAY, ""), *((day - datetime.timedelta(days=1), name) for name, _, day in hints if day is not None)]
    first, first_reason = max(came, key=lambda hint: hint[0])
    last, last_reason = min(went, key=lambda hint: hint[0])
    first = min(first, last)  # keys of different times, which MaxText would have rejected: the older ones win
    harmless = _HARMLESS if "num_experts" in given else (*_HARMLESS, *_OF_EXPERTS)
    changes = {key: list(timeline)[1:] for key, timeline in part("defaults").items() if key not in {*given, *harmless}}
    open_keys = tuple(key for key, days in changes.items() if any(first < day <= last for day in days))
    reasons = dict.fromkeys(f"`{name}`" for name in (first_reason, last_reason) if name)
    return Era(first, last, f", from {', '.join(reasons)}" if reasons else "; no key narrows it down", open_keys)


def _hints(launch: Launch) -> list[tuple[str, datetime.date | None, datetime.date | None]]:
    """The dated keys and values of a launch, each with the first day that had it and the first that no longer did."""
    spans = lives()
    names = [name for pair in launch.pairs for name in (pair.key, f"{pair.key}={pair.value}")]
    found = [(name, spans[name].get("first"), spans[name].get("last")) for name in names if name in spans]
    found += [(f"M_{pair.key}", day_of("environment_overrides"), None) for pair in launch.overrides]
    entry, entries = launch.entry, part("entries")
    days = [entries[begin] for begin in entries if entry.startswith(begin) or ("/" in begin and begin in entry)]
    return found + [(entry, day, None) for day in days[:1]]
