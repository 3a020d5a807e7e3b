"""Names of compile targets."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from paxcli.errors import ConfigError, MissingError
from paxcli.programs.topologies import find_compile_target


def test_without_libtpu_the_error_names_the_package(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="libtpu") as caught:
        find_compile_target("v4-8").devices()
    assert "pip install 'jax[tpu]'" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--xla_nonsense=true", "Unknown command line flag 'xla_nonsense'"),
        ("--xla_tpu_scoped_vmem_limit_kib=much", "Illegal value 'much' specified for flag"),
    ],
)
def test_an_argument_that_libtpu_does_not_know_does_not_end_the_process(monkeypatch, arguments, problem) -> None:
    pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", arguments)
    with pytest.raises(ConfigError, match=problem) as caught:
        find_compile_target("v5e-4").devices()
    assert "mesh.libtpu_options" in str(caught.value.hint)


def test_other_options_than_libtpu_has_read_are_refused() -> None:
    """It would compile with the first ones, silently. Options that it refused were not read."""
    pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
    code = """
import paxcli as pax
from paxcli.programs.ahead_of_time import open_on_target, target_of

for options in ({"xla_nonsense": 1}, {"xla_tpu_scoped_vmem_limit_kib": 4096}, None):
    config = pax.load("tiny-synthetic", set={"mesh.libtpu_options": options}).config
    try:
        with open_on_target(config, target_of(config, "v5e-1", None)):
            print("opened")
    except pax.ConfigError as error:
        print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    unknown, opened, refused = done.stdout.splitlines()
    assert "Unknown command line flag" in unknown and opened == "opened"
    assert refused == "libtpu has read other `mesh.libtpu_options`, which it does once."


# As in MaxText's table of compile topologies: name, shape, rings.
@pytest.mark.parametrize(
    ("name", "generation", "shape", "ring"),
    [
        ("v4-8", "v4", (2, 2, 1), (False,) * 3),
        ("v4-128", "v4", (4, 4, 4), (True,) * 3),
        ("v4-384", "v4", (4, 4, 12), (True,) * 3),
        ("v5p-1024", "v5p", (8, 8, 8), (True,) * 3),
        ("v5e-16", "v5e", (4, 4), (False, False)),
        ("v5litepod-128", "v5e", (8, 16), (False, True)),
        ("v6e-256", "v6e", (16, 16), (True, True)),
        ("tpu7x-128", "tpu7x", (4, 4, 4), (True,) * 3),
        ("v4:4x4x12", "v4", (4, 4, 12), (True,) * 3),
    ],
)
def test_cloud_names_map_to_shapes(name, generation, shape, ring) -> None:
    target = find_compile_target(name)
    assert (target.generation, target.shape, target.wraps) == (generation, shape, ring)


def test_devices_of_this_machine_are_those_of_all_slices() -> None:
    target = find_compile_target("cpu:8", 2)
    assert (target.num_slices, target.devices_per_slice) == (1, 8)


@pytest.mark.parametrize(
    "name", ["v9-8", "v4-9", "v4:", "x:2x2", "cpu:0", "cpu", "v5e:4x4x4", "v5e:16x16x1", "v6e:16x32", "v4:16x16"]
)
def test_other_names_are_rejected(name) -> None:
    with pytest.raises(ConfigError):
        find_compile_target(name)
