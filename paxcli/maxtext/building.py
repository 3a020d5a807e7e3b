"""The config of a converted recipe, built as `pax train` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.maxtext.conversion import BASE_RECIPE, Converted


def build_config(converted: Converted) -> fdl.Config:
    """The recipe's config."""
    return config_with(converted.values)


def config_with(values: Mapping[str, Any]) -> fdl.Config:
    """`BASE_RECIPE` with values on it."""
    config = load(BASE_RECIPE).config
    for path, value in values.items():
        assign(config, path, value)
    return config
