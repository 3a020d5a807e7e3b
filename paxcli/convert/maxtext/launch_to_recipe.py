"""Converts a MaxText launch to a recipe."""

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
from paxcli.convert.maxtext.model_map import set_model
from paxcli.convert.maxtext.settings import Settings, settings_of
from paxcli.convert.maxtext.sizes import StepFlops, flops, parameters
from paxcli.convert.maxtext.topology import Topology, set_mesh, topology_of
from paxcli.convert.maxtext.training_map import global_batch, set_training

BASE_RECIPE = "maxtext-base"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A recipe for a launch, and the facts for the report.

    Attributes:
      name: The name of its file, with the line if there are several launches.
      values: Path -> plain value, to be assigned to `BASE_RECIPE` in order.
      rows: The source of each value.
      settings: MaxText's values, with dropped keys, warnings and undecided questions.
      approximated: What pax computes approximately.
      parameters: The number of MaxText's parameters, from its own sizes.
      flops: TFLOPs per step and device, by MaxText's formula of the date.
      tokens_per_step: Over all devices; None if their number is unknown.
      num_devices: Over all slices; None if unknown.
      topology: Devices per slice, and slices.
      flags: `LIBTPU_INIT_ARGS` and `XLA_FLAGS`.
      note: The comment after the command, often a measured speed.
    """

    name: str
    values: dict[str, Any]
    rows: list[Row]
    settings: Settings
    approximated: list[str]
    parameters: int
    flops: StepFlops
    tokens_per_step: int | None
    num_devices: int | None
    topology: Topology
    flags: dict[str, str]
    note: str


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
    draft = Draft(settings_of(launch, date))
    found = topology_of(launch, draft, name, topology, slices)
    set_mesh(draft, found)
    set_model(draft)
    set_training(draft)
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
