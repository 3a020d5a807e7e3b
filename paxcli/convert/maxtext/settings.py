"""MaxText's values for a launch: its keys override those of its model, and these the defaults of its date.

The date is inferred from the keys: the defaults changed over time.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.errors import ConfigError, did_you_mean, nearest

_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}
_LARGEST = 10**12
_MOST_HINTS = 50  # nearest names are slow to find
LAST_DAY = datetime.date(2026, 8, 22)  # that the tables cover


@dataclasses.dataclass(frozen=True)
class Era:
    """The days on which a launch may have been written.

    Attributes:
      first: The first.
      last: The last, included, whose defaults apply.
      text: A description for the report.
      open_keys: Keys without a value in the launch whose defaults changed between these days.
    """

    first: datetime.date
    last: datetime.date
    text: str
    open_keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value, and where it comes from.

    Attributes:
      value: Typed like the key's default.
      origin: `script`, `environment`, `model`, `default`.
      line: In the script.
    """

    value: Any
    origin: str = "default"
    line: int | None = None


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A key that the recipe has no value for."""

    key: str
    value: str
    line: int
    why: str


@dataclasses.dataclass
class Settings:
    """All of MaxText's values that a recipe depends on, with remarks for the report."""

    values: dict[str, Setting]
    era: Era
    model_name: str
    dropped: list[Dropped] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    undecided: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        return self.values[key].value if key in self.values else tables.default(key, self.date)

    def is_set(self, key: str) -> bool:
        """Whether the launch or its model sets it."""
        return key in self.values and self.values[key].origin != "default"

    @property
    def date(self) -> datetime.date:
        """The day whose defaults apply."""
        return self.era.last


def settings_of(launch: Launch, date: datetime.date | None = None) -> Settings:
    """MaxText's values for a launch.

    Raises:
      ConfigError: A value cannot be read, or the model has no such name.
    """
    understood = any(pair.key in tables.known_keys() or tables.drop_reason(pair.key) for pair in launch.pairs)
    if (launch.pairs or launch.diagnostics) and not understood and not launch.overrides:
        names = [pair.key for pair in launch.pairs] or [found.text for found in launch.diagnostics]
        hint = "Set the script's variables with `--arg NAME=…`, or give its keys: `model_name=… steps=…`."
        raise ConfigError(f"Line {launch.line}: the launch has no key that pax knows: {', '.join(names[:6])}.", hint)
    dropped: list[Dropped] = []
    pairs = _rename_keys(launch.pairs, dropped)
    name = next((pair.value for pair in reversed(pairs) if pair.key == "model_name"), "default") or "default"
    warnings = [f"Line {found.line}: `{found.text}`: {found.reason}." for found in launch.diagnostics]
    model = _model(name.removesuffix("-Instruct"), warnings)
    settings = Settings({}, era_of(launch, {*model, *(pair.key for pair in pairs)}, date), name, dropped, warnings)
    if settings.era.open_keys:
        settings.undecided.append(
            f"The date: the script is of {settings.era.text}, and on these days the defaults of "
            f"{', '.join(settings.era.open_keys)} changed. Those of {settings.date} are used; give `--date`."
        )
    model = {key: tables.value_on(settings.date, value) for key, value in model.items() if key != "published"}
    model = {key: value for key, value in model.items() if value is not None}
    reasons = {key: reason for key in model if (reason := tables.drop_reason(key))}
    settings.dropped += [Dropped(key, str(model.pop(key)), 0, reason) for key, reason in reasons.items()]
    settings.values |= {key: Setting(tables.default(key, settings.date)) for key in tables.part("defaults")}
    settings.values |= {key: Setting(value, "model") for key, value in model.items()}
    _put(pairs, "script", settings, model)
    _put_overrides(launch, settings, model)
    return settings


def _model(name: str, warnings: Sequence[str]) -> Mapping[str, Any]:
    models = tables.table("models")
    if name not in ("default", *models):
        hint = did_you_mean(name, models) or "Give the keys of its .yml instead."
        raise ConfigError(" ".join([f"Pax's tables have no model `{name}` of MaxText.", *warnings]), hint)
    return models.get(name, {})


def _rename_keys(pairs: list[Pair], dropped: list[Dropped]) -> list[Pair]:
    """Keys by their newest names; those without an equivalent in a recipe go to `dropped`."""
    found: list[Pair] = []
    for pair in pairs:
        alias = tables.part("aliases").get(pair.key)
        reason = alias.get("drop") if alias else tables.drop_reason(pair.key)
        if reason:
            dropped.append(Dropped(pair.key, pair.value, pair.line, reason))
        elif alias:
            value = {str(k).lower(): v for k, v in alias.get("values", {}).items()}.get(pair.value.lower(), pair.value)
            found += [dataclasses.replace(pair, key=key, value=value) for key in alias["now"]]
        elif pair.key in tables.known_keys():
            found.append(pair)
        else:
            like = nearest(pair.key, tables.known_keys()) if len(dropped) < _MOST_HINTS else ()
            hint = f"; similar are {', '.join(like)}" if like else ""
            dropped.append(Dropped(pair.key, pair.value, pair.line, f"unknown to pax{hint}"))
    return found


def _put(pairs: list[Pair], origin: str, settings: Settings, model: Mapping[str, Any]) -> None:
    seen: dict[str, Pair] = {}
    overrides = any(p.key == "override_model_config" and p.value.lower() == "true" for p in pairs)
    for pair in pairs:
        if (before := seen.get(pair.key)) is not None and before.value != pair.value:
            settings.warnings.append(
                f"Line {pair.line}: {pair.key} is set twice, to {before.value} and {pair.value}: the last one applies."
            )
        seen[pair.key] = pair
    for pair in seen.values():
        if pair.missing and not isinstance(_like(pair.key), str):
            settings.undecided.append(_needs(pair, "MaxText's default is used"))
            continue
        if pair.missing:
            settings.undecided.append(_needs(pair, f"it is left as `{pair.value}`" if pair.value else "it is left out"))
        if (value := parse_value(pair)) is None:
            continue
        if pair.in_config and pair.key in model:
            if value not in (model[pair.key], tables.default(pair.key, settings.date)):
                settings.warnings.append(
                    f"Line {pair.line}: {pair.key}={pair.value} has no effect: model {settings.model_name} overrides "
                    f"the keys of a .yml. Give it on the command line, with override_model_config=true."
                )
            continue
        if pair.key in model and model[pair.key] != value and not overrides:
            settings.warnings.append(
                f"Line {pair.line}: {pair.key}={pair.value} contradicts model {settings.model_name}, which has "
                f"{model[pair.key]}: MaxText stops unless override_model_config=true."
            )
            settings.undecided.append(f"{pair.key}: {pair.value} of line {pair.line} is used, not the model's.")
        settings.values[pair.key] = Setting(value, origin, pair.line)


def _put_overrides(launch: Launch, settings: Settings, model: Mapping[str, Any]) -> None:
    """Sets keys of the environment. MaxText rejects one that is misspelt or also on the command line."""
    given = {pair.key for pair in launch.pairs}
    taken = []
    for pair in launch.overrides:
        key = pair.key.lower()
        problem = "is also on the command line, which applies here" if key in given else None
        problem = problem if key in tables.known_keys() else "is not a key"
        problem = problem if pair.key.isupper() else "is not in upper case"
        if problem:
            settings.warnings.append(f"Line {pair.line}: M_{pair.key} {problem}, which MaxText rejects.")
        else:
            taken.append(dataclasses.replace(pair, key=key))
    _put(_rename_keys(taken, settings.dropped), "environment", settings, model)


def _needs(pair: Pair, otherwise: str) -> str:
    what = ", ".join(f"`{name}`" for name in sorted(pair.missing))
    names = [name.strip("${}") for name in sorted(pair.missing) if re.fullmatch(r"\w+|\$\{\w+\}", name)]
    option = f" Give `--arg {names[0]}=…`." if names else ""
    return f"Line {pair.line}: {pair.key} needs {what}, whose value pax does not know; {otherwise}.{option}"


def _like(key: str) -> Any:
    """A value of a key's type: its newest default, or a text if it has none."""
    return [*tables.part("defaults").get(key, {tables.FIRST_DAY: ""}).values()][-1]


def parse_value(pair: Pair) -> Any:
    """The value of a pair, in the type of the key's default; None for `null`, which means that default.

    Raises:
      ConfigError: It is not of that type.
    """
    like, text = _like(pair.key), pair.value.strip()
    is_null = text.lower() in ("none", "null")
    if is_null and type(like) is not str:
        return None
    try:
        if isinstance(like, bool):
            return _BOOLS[text.lower()]
        if isinstance(like, list):
            items = [item.strip() for item in text.split(",") if item.strip()]
            return [*yaml.safe_load(text)] if text.startswith("[") else items
        if isinstance(like, str):
            return "" if is_null and pair.key != "remat_policy" else text  # which has a policy called `none`
        whole = text.rstrip("0").rstrip(".") if "." in text else text
        number = int(whole) if isinstance(like, int) else float(text)
        if not abs(number) <= _LARGEST:  # infinite, not a number, or far too large
            raise ValueError(number)
        return number
    except (ValueError, KeyError, yaml.YAMLError):
        kind = {"bool": "true or false", "int": "an integer", "list": "a list"}.get(type(like).__name__, "a number")
        hint = f"Correct it; MaxText's default is {like}."
        raise ConfigError(f"Line {pair.line}: {pair.key}={pair.value} is not {kind}.", hint) from None


def era_of(launch: Launch, given: Collection[str], date: datetime.date | None = None) -> Era:
    """When a launch was written.

    Args:
      launch: The launch.
      given: Keys that have values, whose defaults do not matter. A `decoder_block` implies its kind of positions.
      date: Given by the user; overrides the rest.
    """
    given = {*given, "_position"} if "decoder_block" in given else given
    if date is not None:
        return Era(date, date, f"{date}, as given")
    hints = _hints(launch)
    came = [(tables.FIRST_DAY, ""), *((day, name) for name, day, _ in hints if day is not None)]
    went = [(LAST_DAY, ""), *((day - datetime.timedelta(days=1), name) for name, _, day in hints if day is not None)]
    first, first_reason = max(came, key=lambda hint: hint[0])
    last, last_reason = min(went, key=lambda hint: hint[0])
    first = min(first, last)  # keys of different times, which MaxText would have rejected: the older ones win
    harmless = [*tables.part("harmless"), *(tables.part("of_experts") if "num_experts" not in given else ())]
    usual = tables.part("defaults").items()
    changes = {key: list(timeline)[1:] for key, timeline in usual if key not in {*given, *harmless}}
    open_keys = tuple(key for key, days in changes.items() if any(first < day <= last for day in days))
    reasons = dict.fromkeys(f"`{name}`" for name in (first_reason, last_reason) if name)
    days = f"{first} to {last}" if first != last else str(first)
    reason = f", from {', '.join(reasons)}" if reasons else "; no key narrows it down"
    return Era(first, last, f"{days}{reason}", open_keys)


def _hints(launch: Launch) -> list[tuple[str, datetime.date | None, datetime.date | None]]:
    """The dated keys and values of a launch, each with the first day that had it and the first that no longer did."""
    spans = tables.lives()
    names = [name for pair in launch.pairs for name in (pair.key, f"{pair.key}={pair.value}")]
    found = [(name, spans[name].get("first"), spans[name].get("last")) for name in names if name in spans]
    found += [(f"M_{pair.key}", tables.day_of("environment_overrides"), None) for pair in launch.overrides]
    entry, entries = launch.entry, tables.part("entries")
    days = [entries[begin] for begin in entries if entry.startswith(begin) or ("/" in begin and begin in entry)]
    return found + [(entry, day, None) for day in days[:1]]
