"""Mesh shapes: validated without devices, and built on fake ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.mesh.axes import MESH_AXES, Axis
from paxcli.mesh.mesh import Mesh, axis_sizes, build_mesh, describe


class Device:
    """A fake device with the attributes that `build_mesh` reads."""

    platform, device_kind, process_index = "gpu", "fake", 0

    def __init__(self, id: int, slice_index: int = 0):
        self.id, self.slice_index = id, slice_index

    def __repr__(self) -> str:
        return f"d{self.id}"


def ids(config: Mesh, devices: list[Device], *axes: str) -> list:
    mesh = build_mesh(config, devices)
    grid = np.vectorize(lambda device: device.id)(mesh.devices)
    return grid.reshape([mesh.shape[axis] for axis in axes]).tolist()


def test_axes_run_from_the_slowest_links_to_the_fastest():
    assert MESH_AXES == ("stage", "data", "fsdp", "context", "expert", "tensor")
    assert Axis.FSDP == "fsdp"


@pytest.mark.parametrize(
    ("ici", "dcn", "expected"),
    [
        (None, None, {}),
        ([1, 4, 2], None, {"fsdp": 4, "tensor": 2}),
        ([4, 1, 8, 2], [1, 2, 1, 1], {"stage": 4, "data": 2, "fsdp": 8, "tensor": 2}),
        ({"fsdp": 4}, [2, 1, 1], {"data": 2, "fsdp": 4}),
        ({"fsdp": 4}, {"fsdp": 2, "data": 3}, {"data": 3, "fsdp": 8}),
    ],
)
def test_sizes_are_the_elementwise_product(ici, dcn, expected):
    assert axis_sizes(ici, dcn) == {axis: expected.get(axis, 1) for axis in MESH_AXES}


def test_num_devices():
    assert Mesh().num_devices() is None
    assert Mesh([2, 4, 2], [2, 1, 1]).num_devices() == 32
    assert Mesh(None, {"data": 2}).num_devices() is None


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"ici_mesh_shape": {"tensr": 2}}, "tensr", "`tensor`"),
        ({"ici_mesh_shape": {"mdl": 2}}, "mdl", "data, fsdp, tensor"),
        ({"ici_mesh_shape": [2, 2]}, "2 numbers", "fsdp: 4"),
        ({"dcn_mesh_shape": [1, 0, 1]}, "mesh.dcn_mesh_shape.1 must be at least 1, not 0", None),
        ({"logical_axis_rules": {"mpl": "tensor"}}, "mpl", "`mlp`"),
        ({"logical_axis_rules": {"mlp": ["tensor", "fspd"]}}, "fspd", "`fsdp`"),
    ],
)
def test_mistakes_are_found_without_a_device(fields, message, hint):
    with pytest.raises(ConfigError) as caught:
        Mesh(**fields).validate()
    assert message in caught.value.message
    assert hint is None or hint in caught.value.hint


def test_a_size_of_another_type_is_refused_when_the_recipe_is_loaded():
    with pytest.raises(ConfigError, match=r"mesh\.ici_mesh_shape: expected int .*True"):
        resolve("tiny", sets={"mesh.ici_mesh_shape": {"data": True}})


def test_a_mesh_must_use_every_device():
    with pytest.raises(ConfigError) as caught:
        build_mesh(Mesh([3, 1, 2]), [Device(i) for i in range(8)])
    assert caught.value.message == "mesh data=3 × tensor=2 needs 6 devices, found 8."
    assert "--set mesh.ici_mesh_shape='{data: 8}'" in caught.value.hint
    with pytest.raises(ConfigError, match="mesh data=1 needs 1 device, found 8"):
        build_mesh(Mesh({}), [Device(i) for i in range(8)])
    with pytest.raises(ConfigError, match="mesh data=6 needs 6 devices, found 8") as caught:
        build_mesh(Mesh(None, [3, 1, 1]), [Device(i) for i in range(8)])
    assert "mesh.dcn_mesh_shape=null" in caught.value.hint


def test_without_a_shape_all_devices_are_on_data():
    mesh = build_mesh(Mesh())
    assert describe(mesh.shape) == f"data={jax.device_count()}"
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 6
    assert build_mesh(Mesh(None, {"fsdp": 2}), [Device(i) for i in range(8)]).shape["data"] == 4


def test_slices_are_outermost_within_each_axis():
    config = Mesh({"data": 2, "tensor": 2}, {"data": 2})
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    contiguous = [Device(i) for i in range(8)]
    sliced = [Device(i, slice_index=i // 4) for i in range(8)]
    assert ids(config, contiguous, "data", "tensor") == ids(config, sliced, "data", "tensor") == expected
    config = Mesh({"data": 2, "tensor": 2}, {"tensor": 2})
    assert ids(config, contiguous, "data", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ids(config, sliced, "data", "tensor") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_tpu_slices_must_match_the_dcn_shape():
    devices = [Device(i, slice_index=i // 4) for i in range(8)]
    for device in devices:
        device.platform = "tpu"
    with pytest.raises(ConfigError, match="asks for 1 slice, but the TPU devices form 2"):
        build_mesh(Mesh({"data": 8}), devices)
