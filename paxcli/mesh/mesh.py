"""The mesh of a recipe, and the `jax.sharding.Mesh` built from it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from paxcli.config.configurable import Configurable
from paxcli.config.fields import AnyFloat, AnyInt, NotCompiled, PositiveFloat, PositiveInt, Seconds, Unit
from paxcli.config.tree import check_fields
from paxcli.errors import ConfigError
from paxcli.mesh.axes import MESH_AXES
from paxcli.mesh.rules import check_mesh_axis, merge_rules
from paxcli.mesh.startup import start_distributed

Shape = Mapping[str, int] | Sequence[int]

_LIST_AXES = {3: ("data", "fsdp", "tensor"), 4: ("stage", "data", "fsdp", "tensor")}


@dataclasses.dataclass
class Mesh(Configurable):
    """Configuration of the device mesh, its sharding rules and its compiler options.

    Args:
      ici_mesh_shape: Mesh shape within a slice: sizes by axis, or Pax's [replica, data, mdl] = [data, fsdp, tensor];
        with four numbers the first is `stage`. None: all devices on the `data` axis.
      dcn_mesh_shape: Number of slices along each axis, in the same notation. None: a single slice.
      logical_axis_rules: Overrides of the default rules: logical axis to one mesh axis, several, or None (replicated).
      libtpu_options: libtpu's start-up options, name to value (`LIBTPU_INIT_ARGS` without the dashes). Ignored on
        other platforms.
      compiler_options: XLA compiler options, name to value. They override pax's presets for the platform
        (`compiler_options.yaml`); null leaves an option at XLA's default.
      peak_tflops: Peak dense TFLOP/s of one device, for MFU. None: the published peak of its device kind.
      start_timeout_seconds: In a job of several processes, how long each waits at its start for the others.
      heartbeat_timeout_seconds: After this time without a sign of life from one process, the others exit with code 75.
    """

    ici_mesh_shape: dict[str, PositiveInt] | list[PositiveInt] | None = None
    dcn_mesh_shape: dict[str, PositiveInt] | list[PositiveInt] | None = None
    logical_axis_rules: dict[str, str | list[str] | None] | None = None
    libtpu_options: dict[str, str | AnyInt | AnyFloat | bool] | None = None
    compiler_options: dict[str, str | AnyInt | AnyFloat | bool | None] | None = None
    peak_tflops: Annotated[PositiveFloat, Unit("TFLOP/s")] | None = None
    start_timeout_seconds: NotCompiled[Seconds] = 300.0
    heartbeat_timeout_seconds: NotCompiled[Annotated[PositiveInt, Unit("seconds")]] = 100

    def validate(self) -> None:
        """Checks names and sizes; needs no device. Raises ConfigError."""
        check_fields(self, "mesh.")
        axis_sizes(self.ici_mesh_shape, self.dcn_mesh_shape)
        merge_rules(self.logical_axis_rules)
        libtpu_arguments(self.libtpu_options)

    def start_processes(self) -> None:
        """Joins the other processes of this job, if any: `startup.start_distributed`."""
        libtpu = libtpu_arguments(self.libtpu_options)
        start_distributed(self.start_timeout_seconds, libtpu, self.heartbeat_timeout_seconds)

    def num_devices(self) -> int | None:
        """The number of devices that this mesh needs, or None if it uses all available devices."""
        if self.ici_mesh_shape is None:
            return None
        return math.prod(axis_sizes(self.ici_mesh_shape, self.dcn_mesh_shape).values())

    def num_slices(self) -> int:
        """The number of slices."""
        return math.prod(axis_sizes(None, self.dcn_mesh_shape).values())

    def ici_sizes(self, num_devices: int) -> dict[str, int]:
        """The size of every axis inside a slice. Without a shape, `data` has all of a slice's devices.

        Args:
          num_devices: Devices of all slices.
        """
        filled = {"data": max(num_devices // self.num_slices(), 1)}
        return _sizes(filled if self.ici_mesh_shape is None else self.ici_mesh_shape, "mesh.ici_mesh_shape")


def libtpu_arguments(options: Mapping[str, Any] | None) -> str:
    """Formats options for `LIBTPU_INIT_ARGS`: `--name=value --name=value`.

    Raises:
      ConfigError: A name is invalid, or a value has spaces, quotes or backslashes.
    """
    for name, value in (options or {}).items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or not re.fullmatch(r"[^\s'\"\\]+", str(value)):
            hint = "Example: {xla_tpu_scoped_vmem_limit_kib: 98304}. Names have no dashes, values no spaces."
            raise ConfigError(f"mesh.libtpu_options: {name}={value!r} is not a libtpu option.", hint)
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in (options or {}).items()}
    return " ".join(f"--{name}={value}" for name, value in values.items())


def axis_sizes(ici: Shape | None, dcn: Shape | None) -> dict[str, int]:
    """The size of every mesh axis, outer to inner: the elementwise product of the ICI and DCN shapes."""
    inner, outer = _sizes(ici, "mesh.ici_mesh_shape"), _sizes(dcn, "mesh.dcn_mesh_shape")
    return {axis: inner[axis] * outer[axis] for axis in MESH_AXES}


def describe(sizes: Mapping[str, int]) -> str:
    """A readable mesh shape: `data=3 × tensor=2`."""
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"


def build_mesh(config: Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Builds the device mesh of `config` over `devices` (default: all), with every axis, including those of size 1.

    Raises:
      ConfigError: The mesh does not match the number of devices or slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    found, slices = len(devices), config.num_slices()
    ici, dcn = config.ici_sizes(found), _sizes(config.dcn_mesh_shape, "mesh.dcn_mesh_shape")
    sizes = axis_sizes(ici, dcn)
    if (needed := math.prod(sizes.values())) != found:
        fit = f"--set mesh.ici_mesh_shape='{{data: {found // slices}}}'"
        if found % slices:
            fit = f"--set mesh.dcn_mesh_shape=null --set mesh.ici_mesh_shape='{{data: {found}}}'"
        hint = f"Choose a shape that uses all devices, such as {fit}, or run a small model here: --overlay cpu"
        raise ConfigError(f"mesh {describe(sizes)} needs {needed} device{'s' * (needed > 1)}, found {found}.", hint)
    grid = _arrange(list(ici.values()), list(dcn.values()), devices)
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES))


def _sizes(shape: Shape | None, where: str) -> dict[str, int]:
    if shape is None:
        return dict.fromkeys(MESH_AXES, 1)
    if not isinstance(shape, Mapping):
        if len(shape) not in _LIST_AXES:
            expected = "expected 3 ([data, fsdp, tensor]) or 4 ([stage, data, fsdp, tensor])"
            hint = f"Or name the axes: --set {where}='{{fsdp: 4, tensor: 2}}'"
            raise ConfigError(f"`{where}` has {len(shape)} numbers; {expected}.", hint)
        shape = dict(zip(_LIST_AXES[len(shape)], shape, strict=True))
    for axis in shape:
        check_mesh_axis(axis, where)
    return {axis: shape.get(axis, 1) for axis in MESH_AXES}


def _arrange(ici: list[int], dcn: list[int], devices: list[Any]) -> np.ndarray:
    """Arranges devices in an array of shape ICI × DCN (elementwise): ICI neighbours are adjacent on the inner axes."""
    wanted = math.prod(dcn)
    found = len({getattr(device, "slice_index", 0) for device in devices})
    if devices[0].platform == "tpu" and wanted != found:
        asked, hint = f"{wanted} slice{'s' * (wanted > 1)}", f"--set mesh.dcn_mesh_shape='{{data: {found}}}'"
        raise ConfigError(f"mesh.dcn_mesh_shape asks for {asked}, but the TPU devices form {found}.", hint)
    if wanted == 1:
        # JAX splits a physical axis of a TPU torus only if two mesh axes have to share it.
        return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    if wanted == found:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    pairs = np.arange(2 * len(ici)).reshape(2, -1).T.ravel()  # DCN and ICI of the first axis, of the second, …
    groups = np.asarray(devices).reshape(dcn + ici).transpose(pairs)
    return groups.reshape([inner * outer for inner, outer in zip(ici, dcn, strict=True)])
