"""Checks of a recipe that need no device."""

from __future__ import annotations

import pytest

import paxcli as pax
from paxcli.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train_input.num_infeed_hosts", 4),
        ("train_input.infeed_host_index", 1),
        ("train_input.is_training", False),
        ("eval_inputs.0.num_infeed_hosts", 2),
    ],
)
def test_values_that_a_run_overwrites_are_refused(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{path}={value} has no effect"):
        pax.load("tiny", set={path: value}).validate()
