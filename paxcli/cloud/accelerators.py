"""TPU slices by their Google Cloud names: chips, hosts, JAX devices, runtime.

Sources: the pages "TPU versions" and "TPU software versions" of the Cloud TPU documentation. Host counts are estimates,
since those pages and others disagree for v5e and v6e. `cloud/states.py` asks a running slice for its workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

from paxcli.errors import ConfigError, did_you_mean

_SMALL_3D = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"}
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_FLAT_SHAPES = _FLAT | {512: "16x32", 1024: "32x32"}


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """One TPU generation.

    Args:
      prefix: Prefix of its slices' names.
      unit: Units of the number in a slice's name (cores or chips) in one chip.
      devices_per_chip: JAX devices of a chip; fewer than its cores if two cores form one device (megacore).
      max_chips: Chips of the largest slice.
      chips: Chips of each slice that exists; empty if every multiple of a 4x4x4 cube is a slice.
      runtime: Default runtime version of a TPU VM; None if the generation is available through GKE only.
      gke: Value of the node label `gke-tpu-accelerator`; None if `pax` does not support the generation on GKE.
    """

    prefix: str
    unit: int
    devices_per_chip: int
    max_chips: int
    chips: tuple[int, ...]
    runtime: str | None
    gke: str | None


GENERATIONS = {
    "v2": TpuGeneration("v2", 2, 2, 256, (4, 16, 64, 128, 256), "tpu-ubuntu2204-base", None),
    "v3": TpuGeneration("v3", 2, 2, 1024, (4, 16, 32, 64, 128, 256, 512, 1024), "tpu-ubuntu2204-base", None),
    "v4": TpuGeneration("v4", 2, 1, 2048, (), "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": TpuGeneration("v5litepod", 1, 1, 256, tuple(_FLAT), "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": TpuGeneration("v5p", 2, 1, 6144, (), "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": TpuGeneration("v6e", 1, 1, 256, tuple(_FLAT), "v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": TpuGeneration("tpu7x", 2, 2, 9216, (), None, "tpu7x"),
}
_EXAMPLES = "v4-128, v5litepod-16, v5p-256, v6e-8"
_ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "trillium": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One slice. `type` is its Google Cloud name, and `alias` what was typed if that differs.

    `generation` is a key of `GENERATIONS`, and `row` its value.
    """

    type: str
    generation: str
    row: TpuGeneration
    chips: int
    alias: str | None

    @property
    def devices(self) -> int:
        """JAX devices of the slice."""
        return self.chips * self.row.devices_per_chip

    @property
    def chips_per_host(self) -> int:
        """Chips of one TPU VM (an estimate, see the module)."""
        return self.chips if self.chips <= 8 and self.row.unit == 1 else 4

    @property
    def hosts(self) -> int:
        """TPU VMs of the slice (an estimate, see the module)."""
        return max(1, self.chips // self.chips_per_host)

    @property
    def topology(self) -> str:
        """Chips along each axis, such as `4x4x8`: the shape closest to a cube, as in Google's tables."""
        if self.chips in self.row.chips:
            return _FLAT_SHAPES[self.chips]
        if self.chips in _SMALL_3D:
            return _SMALL_3D[self.chips]
        cubes = self.chips // 64
        sides = [side for side in range(1, cubes + 1) if not cubes % side]
        shapes = [s for s in itertools.combinations_with_replacement(sides, 3) if math.prod(s) == cubes]
        return "x".join(str(4 * side) for side in min(shapes, key=sum))


def find_accelerator(name: str) -> Accelerator:
    """The slice with a name such as `v4-128`, `v5litepod-16` or, in common usage, `v5e-16`.

    Raises:
      ConfigError: There is no such slice.
    """
    match = re.fullmatch(r"([a-z][a-z0-9]{0,15})-([1-9][0-9]{0,5})", name.lower())
    if not match:
        raise ConfigError(f"{name!r} is not an accelerator.", f"Examples: {_EXAMPLES}.")
    typed, count = match[1], int(match[2])
    prefix = _ALIASES.get(typed, typed)
    generation = next((key for key, row in GENERATIONS.items() if row.prefix == prefix), None)
    if generation is None:
        near = did_you_mean(typed, [row.prefix for row in GENERATIONS.values()])
        raise ConfigError(f"There is no TPU generation {typed!r}.", near or f"Examples: {_EXAMPLES}.")
    row = GENERATIONS[generation]
    chips = count // row.unit
    if count % row.unit or chips not in _sizes(row):
        close = sorted(_sizes(row), key=lambda size: abs(size - chips))[:3]
        names = ", ".join(f"{prefix}-{size * row.unit}" for size in sorted(close))
        counts = "cores" if row.unit > 1 else "chips"
        raise ConfigError(f"There is no {prefix}-{count}: the number counts {counts}.", f"Closest: {names}.")
    official = f"{prefix}-{count}"
    return Accelerator(official, generation, row, chips, name if name != official else None)


def _sizes(row: TpuGeneration) -> tuple[int, ...]:
    """Chips of each slice. 3D slices smaller than a 4x4x4 cube have four shapes; larger ones consist of cubes."""
    return row.chips or (*_SMALL_3D, *range(64, row.max_chips + 1, 64))
