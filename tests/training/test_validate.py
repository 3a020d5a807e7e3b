"""Checks of a recipe that need no device."""

from __future__ import annotations

import jax
import pytest

import paxcli as pax
from paxcli.errors import ConfigError, MeshError
from paxcli.training.session import build_session


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


@pytest.mark.parametrize(("shape", "axes"), [([3, 2, 1], "data=3 × fsdp=2"), ([1, 3, 2], "fsdp=3 × tensor=2")])
def test_that_a_mesh_is_for_other_devices_is_said_before_that_it_divides_nothing(shape: list[int], axes: str) -> None:
    config = pax.load("tiny", set={"mesh.ici_mesh_shape": shape}).config
    with pytest.raises(ConfigError, match=f"mesh {axes} needs 6 devices, found 8"):
        build_session(config, jax.local_devices() * 8)
    with pytest.raises(MeshError, match="does not divide over"):
        build_session(config, jax.local_devices() * 6)
