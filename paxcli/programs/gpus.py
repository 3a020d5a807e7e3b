"""NVIDIA GPUs that programs are compiled for on machines without one: what XLA asks of a GPU, and its rates.

Sizes, clocks and bandwidths are those that the GPUs report, and NVIDIA's data sheets'.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import string
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from paxcli.errors import ConfigError, MissingError, first_line
from paxcli.jax_defaults import CUDA_PLUGINS, GPU_MEMORY_FRACTION

MOST_GPUS = 8  # of one machine, all connected by NVLink

_XLA_LIMIT = 0.8  # XLA lets a program use this share of the memory of a GPU that is not attached
_TARGET_CONFIG = Path(__file__).parent / "data" / "gpu_target_config.txtpb"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A model of GPU, with SXM sockets.

    Attributes:
      kind: JAX's `device_kind`.
      capability: Compute capability, major version; the minor one is 0.
      cores: Streaming multiprocessors.
      fpus: Floating-point units of each.
      clock: GHz.
      l2: Bytes of the L2 cache.
      shared: Bytes of shared memory of a multiprocessor; of a block, at most.
      memory: Bytes of its memory.
      hbm: Bytes per second of its memory.
      nvlink: Bytes per second to the other GPUs of its machine, in one direction.
      error: The largest error of the predicted speed in measured steps; None = there are none.
    """

    kind: str
    capability: int
    cores: int
    fpus: int
    clock: float
    l2: int
    shared: tuple[int, int]
    memory: int
    hbm: float
    nvlink: float
    error: float | None = None

    @property
    def fp8_speed(self) -> float:
        """FP8 peak over that in bfloat16; 1 where FP8 operands are converted, before Hopper."""
        return 2.0 if self.capability >= 9 else 1.0

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may use."""
        return int(GPU_MEMORY_FRACTION * self.memory)

    def devices(self, count: int) -> list[Any]:
        """GPUs of one machine to compile for; they cannot run programs.

        Raises:
          MissingError: JAX's CUDA plugin is not installed.
          ConfigError: The plugin cannot describe this GPU.
        """
        if not any(map(importlib.util.find_spec, CUDA_PLUGINS)):
            hint = "pip install 'jax[cuda13]' (Linux only)"
            raise MissingError("Compiling for a GPU needs JAX's CUDA plugin, which is not installed.", hint)
        options = {"target_config": self._target_config(), "topology": f"1x1x{count}"}
        try:
            return list(topologies.get_topology_desc("", "cuda", **options).devices)
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            hint = "Update JAX and its CUDA plugin."
            raise ConfigError(f"JAX's CUDA plugin cannot describe {self.kind}: {first_line(error)}", hint) from error

    def _target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` in text format."""
        shared_per_core, shared_per_block = self.shared
        return string.Template(_TARGET_CONFIG.read_text()).substitute(
            dataclasses.asdict(self),
            shared_per_core=shared_per_core,
            shared_per_block=shared_per_block,
            bandwidth=int(self.hbm),
            visible_memory=int(self.usable_bytes / _XLA_LIMIT),
        )


_HOPPER = {"capability": 9, "cores": 132, "fpus": 128, "clock": 1.98, "l2": 50 << 20, "shared": (233_472, 232_448)}
GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 40 << 20, (167_936, 166_912), 85_100_068_864, 2.039e12, 300e9
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", **_HOPPER, memory=84_942_979_072, hbm=3.352e12, nvlink=450e9),
    "h200": Gpu("NVIDIA H200", **_HOPPER, memory=150_754_820_096, hbm=4.8e12, nvlink=450e9, error=0.11),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 1.965, 132_644_864, (233_472, 232_448), 191_514_411_008, 7.672e12, 900e9),
}
