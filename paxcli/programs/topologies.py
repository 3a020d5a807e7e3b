"""Devices that are not here: TPU slices to compile for, by the names that clouds give them, and CPU devices made up.

libtpu describes any slice to its compiler without a TPU. Which shapes wrap around into rings is Google's documentation:
three-dimensional slices of whole 4x4x4 cubes on every axis, flat ones on an axis of 16 chips.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from paxcli.accelerators import GENERATIONS, find_accelerator
from paxcli.errors import ConfigError, MissingError, first_line

_GIB = 1 << 30
# What libtpu's compiler says a program may use of one device, in GiB: from its message for a program that does not fit.
_AVAILABLE_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}
_RAW = re.compile(rf"({'|'.join(GENERATIONS)}):([0-9]{{1,4}}(?:x[0-9]{{1,4}}){{1,2}})")
_LOCAL = re.compile(r"(cpu|gpu):([1-9][0-9]{0,4})")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      name: As typed: `v4-128`, `v4:4x4x12`, `cpu:8`.
      platform: `tpu`, `cpu` or `gpu`.
      generation: Of a TPU, a key of `GENERATIONS`; else None.
      shape: Chips along each axis of one slice; (devices,) elsewhere.
      wraps: Whether each of those axes is a ring.
      num_slices: How many slices there are.
    """

    name: str
    platform: str
    generation: str | None
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    num_slices: int = 1

    @property
    def hbm_bytes(self) -> int | None:
        """Memory of one device that a program may use; None when it is not known."""
        gib = _AVAILABLE_GIB.get(self.generation or "")
        return None if gib is None else int(gib * _GIB)

    @property
    def devices_per_slice(self) -> int:
        """What `jax.device_count()` is on one slice."""
        per_chip = GENERATIONS[self.generation].devices_per_chip if self.generation else 1
        return math.prod(self.shape) * per_chip

    def devices(self) -> list[Any]:
        """The devices, as JAX sees them: to compile for, not to run on.

        Raises:
          MissingError: libtpu, or as many local devices, are not here.
          ConfigError: libtpu knows no such slice.
        """
        if self.platform != "tpu":
            return _local_devices(self.platform, self.shape[0])
        if importlib.util.find_spec("libtpu") is None:
            raise MissingError(
                "Compiling for a TPU needs libtpu, which is not installed.", "pip install 'paxcli[tpu]' (Linux only)"
            )
        options: dict[str, Any] = {}
        if self.generation == "v4":
            options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as Cloud TPU runs it
        if self.shape == (1, 1):
            options["chips_per_host_bounds"] = (1, 1, 1)
        if any(self.wraps):
            options["wrap"] = (*self.wraps, *(False,) * (3 - len(self.wraps)))
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        name = f"{self.generation}:{'x'.join(map(str, self.shape))}"
        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"libtpu does not describe {self.name}: {first_line(error)}") from error


def find_target(name: str, num_slices: int = 1) -> Target:
    """The target of a name such as `v4-128`, `v5e-16`, `v4:4x4x12` or `cpu:8`.

    Raises:
      ConfigError: There is no such slice.
    """
    local = _LOCAL.fullmatch(name)
    if local:
        return Target(name, local[1], None, (int(local[2]),), (False,), num_slices)
    raw = _RAW.fullmatch(name)
    if raw:
        generation, shape = raw[1], raw[2]
    elif ":" in name:
        raise ConfigError(
            f"{name!r} is no topology.", f"Such as v4:4x4x12, of {', '.join(GENERATIONS)}; or cpu:8; or v4-128."
        )
    else:
        slice_ = find_accelerator(name)
        generation, shape = slice_.generation, slice_.topology
    sizes = tuple(int(size) for size in shape.split("x"))
    return Target(name, "tpu", generation, sizes, _rings(sizes), num_slices)


def slice_of(num_devices: int, generation: str = "v4") -> str:
    """The name of the slice with so many devices, for example `v4-128` of 64.

    Raises:
      ConfigError: There is none.
    """
    row = GENERATIONS[generation]
    name = f"{row.prefix}-{num_devices * row.unit // row.devices_per_chip}"
    try:
        return find_accelerator(name).type
    except ConfigError as error:
        raise ConfigError(
            f"No TPU {generation} slice has {num_devices} device{'s' * (num_devices > 1)}, as the recipe's mesh has.",
            f"Name one, such as `--topology v5e-{num_devices}` or `--topology {generation}-128`. {error.hint}",
        ) from error


def leave_accelerators_alone() -> None:
    """Readies this process to compile only: JAX runs on the CPU, and libtpu looks for no TPU and takes no lock.

    Call it before anything touches a device.
    """
    jax.config.update("jax_platforms", "cpu")
    # Without these libtpu asks a metadata server, warns at length, and lets no second process load it.
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v4-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ[variable] = value


def _rings(shape: tuple[int, ...]) -> tuple[bool, ...]:
    if len(shape) == 3:
        return (all(size % 4 == 0 for size in shape),) * 3
    return tuple(size == 16 for size in shape)


def _local_devices(platform: str, count: int) -> list[Any]:
    if platform == "cpu" and jax.config.jax_num_cpu_devices < count:  # pyrefly: ignore[missing-attribute]
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # the devices have started: it is too late, and counted below
    try:
        found = jax.devices(platform)
    except RuntimeError:
        found = []
    if len(found) < count:
        raise MissingError(f"{platform}:{count} are not here: this machine has {len(found)} such devices.")
    return found[:count]
