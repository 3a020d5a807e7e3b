"""A recipe converted from a launch: values by path, the MaxText keys that they come from, and facts for the report."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.launch import Launch
from paxcli.convert.maxtext.settings import Dropped, Settings


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices per slice, and slices; None if unknown. `source` is their origin."""

    devices: int | None = None
    slices: int | None = None
    source: str = ""


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
class Conversion:
    """A recipe for a launch.

    Attributes:
      name: The name of its file, with the line if there are several launches.
      launch: The launch.
      settings: MaxText's values, with dropped keys, warnings and undecided questions.
      values: Path -> plain value, to be assigned to the base recipe in order.
      rows: The source of each value.
      approximated: What pax computes approximately as MaxText does.
      topology: Devices per slice, and slices.
      num_devices: Over all slices; None if unknown.
    """

    name: str
    launch: Launch
    settings: Settings
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    approximated: list[str] = dataclasses.field(default_factory=list)
    topology: Topology = Topology()
    num_devices: int | None = None

    @property
    def global_batch(self) -> int | None:
        """Rows per step over all devices; None if the number of devices is unknown."""
        if self.num_devices is None:
            return None
        rows = int(self.num_devices * self.settings["per_device_batch_size"])
        return rows * self.settings["gradient_accumulation_steps"]

    @property
    def tokens_per_step(self) -> int | None:
        """Over all devices; None if their number is unknown."""
        return None if self.global_batch is None else self.global_batch * self.settings["max_target_length"]

    def copy(self, at: str, *fields: str) -> None:
        """Sets fields of the object at a path to the values of their keys in the table `recipe_keys`."""
        for path in (f"{at}.{field}" for field in fields):
            key, *off = tables.table("recipe_keys")[re.sub(r"stack\.(turns\.[0-9]+|first)", "stack.block", path)]
            value = self.settings[key]
            self.set(path, None if off and value <= type(value)() else value, key)

    def set(self, path: str, value: Any, *keys: str, scaled: Any = None) -> None:
        """Sets the value of a path, with the keys that it comes from; no keys = fixed in MaxText's code."""
        self.values[path] = value
        found = [(key, self.settings.values[key]) for key in keys if key in self.settings.values]
        if scaled is not None and found and scaled != found[0][1].value:
            scales = ("scale", "global_parameter_scale")
            found += [(key, self.settings.values[key]) for key in scales if self.settings.is_set(key)]
        line = next((setting.line for _, setting in found if setting.line is not None), None)
        origins = {setting.origin for _, setting in found}
        origin = next((o for o in ("script", "environment", "model") if o in origins), "default")
        values = [setting.value for _, setting in found]
        shown = values[0] if len(values) == 1 or scaled is not None else ", ".join(map(str, values))
        names = ", ".join(key.lstrip("_") for key, _ in found if key in keys) or "(fixed)"
        self.rows.append(Row(names, shown, shown if scaled is None else scaled, path, value, line, origin))

    def ask(self, text: str) -> None:
        """Reports what the user has to decide, once."""
        if text not in self.settings.undecided:
            self.settings.undecided.append(text)

    def approximate(self, text: str) -> None:
        """Reports what the recipe computes approximately as the launch does."""
        self.approximated.append(text)

    def drop(self, key: str, why: str) -> None:
        """Reports a key of the launch that the recipe has no value for."""
        if self.settings.is_set(key):
            setting = self.settings.values[key]
            self.settings.dropped.append(Dropped(key, str(setting.value), setting.line or 0, why))
