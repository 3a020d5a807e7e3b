"""A recipe while it is built: values by path, the MaxText keys that they come from, and remarks."""

from __future__ import annotations

import dataclasses
from typing import Any

from paxcli.convert.maxtext.settings import Dropped, Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report's table: a MaxText key and the recipe value made from it.

    Attributes:
      maxtext: The key, or several.
      value: MaxText's value.
      scaled: The value after `scale` or `global_parameter_scale`; the same where neither applies.
      pax: The path in the recipe.
      pax_value: The value there.
      line: In the script; None for values of the model and defaults.
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
    """The state of a conversion.

    Attributes:
      settings: MaxText's values.
      values: Path -> plain value, in the order of assignment.
      rows: The table.
      approximated: What pax computes approximately as MaxText does.
      num_devices: Over all slices; None if unknown.
    """

    settings: Settings
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    approximated: list[str] = dataclasses.field(default_factory=list)
    num_devices: int | None = None

    def set(self, path: str, value: Any, *keys: str, scaled: Any = None) -> None:
        """Sets the value of a path, with the keys that it comes from; no keys = fixed in MaxText's code."""
        self.values[path] = value
        found = [(key, self.settings.values[key]) for key in keys if key in self.settings.values]
        if scaled is not None and found and scaled != found[0][1].value:
            scales = ("scale", "global_parameter_scale")
            found += [(key, self.settings.values[key]) for key in scales if self.settings.is_set(key)]
        lines = [setting.line for _, setting in found if setting.line is not None]
        origins = [setting.origin for _, setting in found]
        origin = next((o for o in ("script", "environment", "model") if o in origins), "default")
        values = [setting.value for _, setting in found]
        shown = values[0] if len(values) == 1 or scaled is not None else ", ".join(map(str, values))
        names = ", ".join(key.lstrip("_") for key, _ in found if key in keys) or "(fixed)"
        after = shown if scaled is None else scaled
        self.rows.append(Row(names, shown, after, path, value, lines[0] if lines else None, origin))

    def drop(self, key: str, why: str) -> None:
        """Reports a key of the launch that the recipe has no value for."""
        if self.settings.is_set(key):
            setting = self.settings.values[key]
            self.settings.dropped.append(Dropped(key, str(setting.value), setting.line or 0, why))

    def note_approximation(self, text: str) -> None:
        """Reports something that pax computes approximately."""
        if text not in self.approximated:
            self.approximated.append(text)

    def note_undecided(self, text: str) -> None:
        """Reports something that the user has to decide."""
        if text not in self.settings.undecided:
            self.settings.undecided.append(text)
