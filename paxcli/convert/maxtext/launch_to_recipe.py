"""From a launch to a recipe."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.convert.maxtext.draft import Draft, Row
from paxcli.convert.maxtext.launch import Launch
from paxcli.convert.maxtext.model_map import put_model
from paxcli.convert.maxtext.settings import Dropped, Settings, settings_of
from paxcli.convert.maxtext.sizes import Flops, flops, parameters
from paxcli.convert.maxtext.topology import Topology, put_mesh, topology_of
from paxcli.convert.maxtext.training_map import global_batch, put_training

BASE_RECIPE = "maxtext-base"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A recipe for a launch, and all there is to say about it.

    Attributes:
      name: What to call it.
      values: Path -> plain value on top of `BASE_RECIPE`, in order.
      rows: Where each value comes from.
      settings: MaxText's values, with what was dropped, warned of and left undecided.
      approximated: What pax does nearly alike.
      parameters: Of MaxText's model, by its own sizes.
      flops: TFLOPs of a step on each device, by MaxText's formula of the day.
      tokens_per_step: None when nobody says how many devices there are.
      num_devices: None as well.
      topology: What the devices are taken from.
      flags: `LIBTPU_INIT_ARGS` and `XLA_FLAGS`.
      note: The comment after the command: measured speed, mostly.
    """

    name: str
    values: dict[str, Any]
    rows: list[Row]
    settings: Settings
    approximated: list[str]
    parameters: int
    flops: Flops
    tokens_per_step: int | None
    num_devices: int | None
    topology: Topology
    flags: dict[str, str]
    note: str

    @property
    def dropped(self) -> list[Dropped]:
        """Keys that are left out."""
        return self.settings.dropped


def convert(
    launch: Launch,
    name: str,
    *,
    date: datetime.date | None = None,
    topology: str | None = None,
    slices: int | None = None,
) -> Conversion:
    """Makes a recipe of a launch.

    Args:
      launch: The launch.
      name: The name of its file, which may say the topology.
      date: The day whose defaults hold; None = inferred.
      topology: One slice, such as `v4-128`; None = inferred.
      slices: How many; None = inferred.

    Raises:
      ConfigError: No recipe can be made; the hint says what would help.
    """
    draft = Draft(settings_of(launch, date))
    found = topology_of(launch, draft, name, topology, slices)
    put_mesh(draft, found)
    put_model(draft)
    put_training(draft)
    rows = global_batch(draft)
    return Conversion(
        name=name,
        values=draft.values,
        rows=draft.rows,
        settings=draft.settings,
        approximated=draft.approximated,
        parameters=parameters(draft.settings),
        flops=flops(draft.settings),
        tokens_per_step=rows * draft.settings["max_target_length"] if rows is not None else None,
        num_devices=draft.num_devices,
        topology=found,
        flags=launch.flags,
        note=launch.note,
    )


def config_with(values: Mapping[str, Any]) -> fdl.Config:
    """The config of `BASE_RECIPE` with values assigned, path by path."""
    config = load(BASE_RECIPE).config
    for path, value in values.items():
        assign(config, path, value)
    return config
