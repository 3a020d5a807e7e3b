"""A recipe in the making: values by path, each with the key that it comes from, and what has to be said about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from paxcli.convert.maxtext.settings import Dropped, Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a key of MaxText's and what became of it.

    Attributes:
      maxtext: The key, or several.
      value: MaxText's value.
      scaled: The value after MaxText's scaling; equal to it where nothing scales.
      pax: The path in the recipe.
      pax_value: The value there.
      line: In the script; None for the model's and default values.
      origin: `script`, `environment`, `model`, `default`.
    """

    maxtext: str
    value: Any
    scaled: Any
    pax: str
    pax_value: Any
    line: int | None
    origin: str


@dataclasses.dataclass
class Draft:
    """What a conversion has found so far.

    Attributes:
      settings: MaxText's values.
      values: Path -> plain value, in the order in which they are to be set.
      rows: The table.
      approximated: What pax does nearly as MaxText does.
      num_devices: Over all slices; None when nobody says.
    """

    settings: Settings
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    approximated: list[str] = dataclasses.field(default_factory=list)
    num_devices: int | None = None

    def put(self, path: str, value: Any, *keys: str, scaled: Any = None) -> None:
        """Sets a path, because of these keys; none stand for what was fixed in MaxText's code."""
        self.values[path] = value
        found = [(key, self.settings.values[key]) for key in keys if key in self.settings.values]
        if scaled is not None and found and scaled != found[0][1].value:
            scales = ("scale", "global_parameter_scale")
            found += [(key, self.settings.values[key]) for key in scales if self.settings.given(key)]
        lines = [setting.line for _, setting in found if setting.line is not None]
        origins = [setting.origin for _, setting in found]
        origin = next((o for o in ("script", "environment", "model") if o in origins), "default")
        values = [setting.value for _, setting in found]
        shown = values[0] if len(values) == 1 or scaled is not None else ", ".join(map(str, values))
        names = ", ".join(key.lstrip("_") for key, _ in found if key in keys) or "(fixed)"
        after = shown if scaled is None else scaled
        self.rows.append(Row(names, shown, after, path, value, lines[0] if lines else None, origin))

    def drop(self, key: str, why: str) -> None:
        """Leaves out a key that the launch gives."""
        if self.settings.given(key):
            setting = self.settings.values[key]
            self.settings.dropped.append(Dropped(key, str(setting.value), setting.line or 0, why))

    def near(self, text: str) -> None:
        """Notes something that pax does nearly alike."""
        if text not in self.approximated:
            self.approximated.append(text)

    def ask(self, text: str) -> None:
        """Notes something that the user has to decide."""
        if text not in self.settings.undecided:
            self.settings.undecided.append(text)
