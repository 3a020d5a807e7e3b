"""Compile targets: TPU slices by their cloud names and GPUs by their model, without them, and local devices.

libtpu describes any slice to the compiler, also on a machine without a TPU. According to Google's documentation, every
axis of a 3D slice made of 4x4x4 cubes wraps around into a ring, and so does an axis of 16 chips of a 2D slice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from paxcli.cloud.accelerators import GENERATIONS, find_accelerator
from paxcli.errors import ConfigError, MissingError, first_line
from paxcli.mesh.option_check import run_check
from paxcli.programs.gpus import GPUS, MOST_GPUS, Gpu

# GiB of one device that a program may use, as libtpu's compiler states them when a program does not fit.
_AVAILABLE_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}
# Bytes of a device's share of its host's memory, by Google Cloud's pages of each generation: that of a machine with
# four chips.
_HOST_BYTES = {"v4": 102e9, "v5e": 48e9, "v5p": 112e9, "v6e": 180e9, "tpu7x": 120e9}


@dataclasses.dataclass(frozen=True)
class CompileTarget:
    """Devices that a program is compiled for.

    Attributes:
      name: As typed: `v4-128`, `v4:4x4x12`, `h100:8`, `cpu:8`.
      platform: `tpu`, `cpu` or `gpu`.
      generation: TPU generation, a key of `GENERATIONS`; None for other platforms.
      shape: Chips along each axis of one slice; (devices,) for other platforms.
      wraps: Whether each of those axes is a ring.
      num_slices: Number of slices.
      gpu: Model of the GPUs; None for those of this machine, and for other platforms.
    """

    name: str
    platform: str
    generation: str | None
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    num_slices: int = 1
    gpu: Gpu | None = None

    @property
    def is_local_gpu(self) -> bool:
        """Whether it is GPUs of this machine."""
        return self.platform == "gpu" and self.gpu is None

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes of one device that a program may use; None if unknown."""
        if self.gpu is not None:
            return self.gpu.usable_bytes
        return int(_AVAILABLE_GIB.get(self.generation or "", 0) * 2**30) or None

    @property
    def host_bytes(self) -> float | None:
        """Bytes of one device's share of its host's memory; None if unknown."""
        return _HOST_BYTES.get(self.generation or "")

    @property
    def devices_per_slice(self) -> int:
        """JAX devices of one slice."""
        per_chip = GENERATIONS[self.generation].devices_per_chip if self.generation else 1
        return math.prod(self.shape) * per_chip

    def devices(self) -> list[Any]:
        """Devices to compile for. Those of a TPU, or of a model of GPU, cannot run programs.

        Unless they are local GPUs, this process only compiles from then on (`hide_accelerators`).

        Raises:
          MissingError: libtpu or JAX's CUDA plugin is not installed, or this machine has too few local devices.
          ConfigError: The compiler does not know the devices, or an argument in LIBTPU_INIT_ARGS.
        """
        if not self.is_local_gpu:
            hide_accelerators()
        if self.gpu is not None:
            return self.gpu.devices(self.shape[0])
        if self.platform != "tpu":
            return _local_devices(self.platform, self.shape[0])
        if importlib.util.find_spec("libtpu") is None:
            raise MissingError("Compiling for a TPU needs libtpu (Linux only).", "pip install 'jax[tpu]'")
        _check_libtpu_arguments(os.environ.get("LIBTPU_INIT_ARGS", ""))
        options: dict[str, Any] = {"wrap": (*self.wraps, False)[:3], "num_slices": self.num_slices}
        if self.generation == "v4":
            options["chip_config_name"] = "megacore"  # one device for both cores of a chip, as on Cloud TPU
        if self.shape == (1, 1):
            options["chips_per_host_bounds"] = (1, 1, 1)
        name = f"{self.generation}:{'x'.join(map(str, self.shape))}"
        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
        except jax.errors.JaxRuntimeError as error:
            hint = "Choose another `--topology`."
            raise ConfigError(f"libtpu cannot describe {self.name}: {first_line(error)}", hint) from error


@functools.cache
def _check_libtpu_arguments(arguments: str) -> None:
    """Starts libtpu in another process with these LIBTPU_INIT_ARGS, once: an argument that it does not know ends it.

    Raises:
      ConfigError: It ended, or libtpu has started in this process with others.
    """
    if _check_libtpu_arguments.cache_info().currsize:  # an earlier call, with other arguments
        raise ConfigError("libtpu has read other `mesh.libtpu_options`, which it does once.", "Use another process.")
    if not arguments:
        return
    done = run_check("tpu", {}, dict(os.environ))
    if refusal := re.search(r"^ERROR: (.*)", done.stderr, re.MULTILINE):
        hint = "Correct `mesh.libtpu_options`, or LIBTPU_INIT_ARGS in the environment."
        raise ConfigError(f"libtpu does not start: {refusal[1]}.", hint)


def find_compile_target(name: str, num_slices: int = 1) -> CompileTarget:
    """The target with a name such as `v4-128`, `v5e-16`, `v4:4x4x12`, `h100:8` or `cpu:8`.

    Raises:
      ConfigError: Unknown TPU slice or topology, or more GPUs than a machine has.
    """
    if gpus := re.fullmatch(rf"({'|'.join(GPUS)}):([0-9]+)", name):
        count = int(gpus[2])
        if not 1 <= count <= MOST_GPUS or num_slices > 1:
            hint = f"Choose 1 to {MOST_GPUS}, such as `--topology {gpus[1]}:{MOST_GPUS}`, and a mesh of one slice."
            raise ConfigError(f"{name} is not the GPUs of one machine.", hint)
        return CompileTarget(name, "gpu", None, (count,), (False,), gpu=GPUS[gpus[1]])
    if local := re.fullmatch(r"(cpu|gpu):([1-9][0-9]{0,4})", name):
        return CompileTarget(name, local[1], None, (int(local[2]),), (False,))  # of all slices of the mesh
    if raw := re.fullmatch(rf"({'|'.join(GENERATIONS)}):([0-9]{{1,4}}(?:x[0-9]{{1,4}}){{1,2}})", name):
        generation, shape = raw[1], raw[2]
    elif ":" in name:
        known = f"TPU generations: {', '.join(GENERATIONS)}; GPUs: {', '.join(GPUS)}."
        raise ConfigError(f"{name!r} is not a topology.", f"Write v4-128, v4:4x4x12, h100:8 or cpu:8. {known}")
    else:
        slice_ = find_accelerator(name)
        generation, shape = slice_.generation, slice_.topology
    sizes = tuple(int(size) for size in shape.split("x"))
    row = GENERATIONS[generation]
    if len(sizes) != (2 if row.chips else 3) or (row.chips and math.prod(sizes) > row.max_chips):
        form = f"two axes and up to {row.max_chips} chips" if row.chips else "three axes"
        raise ConfigError(f"{name}: a slice of {generation} has {form}.", "Examples: v5e:4x4, v4:4x4x4.")
    return CompileTarget(name, "tpu", generation, sizes, _wraps(sizes), num_slices)


def slice_name(num_devices: int) -> str:
    """Name of the TPU v4 slice with this many devices: `v4-128` for 64.

    Raises:
      ConfigError: There is no such slice.
    """
    try:
        return find_accelerator(f"v4-{2 * num_devices}").type  # the number of its cores: two for each device
    except ConfigError as error:
        raise ConfigError(
            f"The recipe's mesh has {num_devices} device{'s' * (num_devices > 1)}; no TPU v4 slice does.",
            f"Choose a slice, such as `--topology v5e-{num_devices}` or `--topology v4-128`. {error.hint}",
        ) from error


def hide_accelerators() -> None:
    """Prepares this process to compile only: JAX runs on the CPU; libtpu does not look for a TPU and takes no lock.

    Call it before JAX initializes its devices.
    """
    jax.config.update("jax_platforms", "cpu")
    # Without these, libtpu queries a metadata server, logs warnings, and cannot be loaded by a second process.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v4-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _wraps(shape: tuple[int, ...]) -> tuple[bool, ...]:
    if len(shape) == 3:
        return (all(size % 4 == 0 for size in shape),) * 3
    return tuple(size == 16 for size in shape)


def _local_devices(platform: str, count: int) -> list[Any]:
    if platform == "cpu" and jax.config.jax_num_cpu_devices < count:  # pyrefly: ignore[missing-attribute]
        with contextlib.suppress(RuntimeError):  # JAX has initialized its devices already; they are counted below
            jax.config.update("jax_num_cpu_devices", count)
    found = []
    with contextlib.suppress(RuntimeError):
        found = jax.devices(platform)
    if len(found) < count:
        raise MissingError(
            f"{platform}:{count} needs {count} {platform.upper()} devices; this process has {len(found)}.",
            "Choose a smaller `--topology`; in Python, compile for several CPU devices before JAX is used otherwise.",
        )
    return found[:count]
