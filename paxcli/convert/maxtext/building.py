"""The config of a converted recipe, built as `pax train` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxcli.config.assign import assign
from paxcli.config.load import load
from paxcli.convert.maxtext.conversion import BASE_RECIPE


def config_with(values: Mapping[str, Any]) -> fdl.Config:
    """`BASE_RECIPE` with values on it, path by path."""
    config = load(BASE_RECIPE).config
    for path, value in values.items():
        assign(config, path, value)
    return config
