"""Converts a MaxText launch to a recipe."""

from __future__ import annotations

import datetime

from paxcli.convert.maxtext import tables
from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch
from paxcli.convert.maxtext.model_map import set_model
from paxcli.convert.maxtext.settings import Settings, settings_of
from paxcli.convert.maxtext.topology import set_mesh, topology_of
from paxcli.convert.maxtext.training_map import set_training
from paxcli.errors import ConfigError

BASE_RECIPE = "maxtext-base"


def convert(
    launch: Launch,
    name: str,
    *,
    date: datetime.date | None = None,
    topology: str | None = None,
    slices: int | None = None,
) -> Conversion:
    """Converts a launch to a recipe.

    Args:
      launch: The launch.
      name: The name of its file, which may contain the topology.
      date: The day whose defaults apply; None = inferred.
      topology: One slice, such as `v4-128`; None = inferred.
      slices: How many; None = inferred.

    Raises:
      ConfigError: Pax has no such recipe; the hint names the change.
    """
    converted = Conversion(name, launch, settings_of(launch, date))
    _refuse_values(converted.settings)
    converted.topology = topology_of(converted, topology, slices)
    for step in (set_mesh, set_model, _note_differences, set_training):
        step(converted)
    return converted


def _refuse_values(settings: Settings) -> None:
    values = tables.choices(settings["decoder_block"])
    if wrong := {key: settings[key] for key, choices in values.items() if settings[key] not in choices}:
        name = f"model {settings.model_name}" if settings.model_name != "default" else "the launch"
        found = ", ".join(f"{key}={value}" for key, value in wrong.items())
        lacks = "; ".join(tables.lacks(key, value) or "that" for key, value in wrong.items())
        known = "; ".join(f"{key}={', '.join(str(choice) for choice in values[key] if choice != '')}" for key in wrong)
        raise ConfigError(f"{found} of {name}: pax lacks {lacks}.", f"Pax has {known}.")


def _note_differences(draft: Conversion) -> None:
    settings = draft.settings
    for key, note in tables.part("approximated").items():
        excepted = any(settings[other] in values for other, values in note.get("unless", {}).items())
        if settings[key] not in note["exact"] and not excepted:
            draft.approximate(f"{key}={settings[key]}: {tables.value_on(settings.date, note['text'])}.")
