"""Peak FLOP/s of devices, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

_PEAKS: dict[str, dict[str, float]] = yaml.safe_load((Path(__file__).parent / "data" / "peaks.yaml").read_text())


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak of one JAX device in FLOP/s; None if unknown, never a guess.

    Args:
      device_kind: `jax.Device.device_kind`, such as `NVIDIA H200`.
      dtype: NumPy's name of the type of the factors of a matmul.
    """
    table = _PEAKS.get(dtype, {})
    if device_kind.startswith("TPU"):
        name = device_kind if device_kind in table else None
    else:  # the longest name that is part of the kind; a MIG slice is not the full GPU
        words = [name for name in table if re.search(rf"\b{re.escape(name)}\b", device_kind, re.IGNORECASE)]
        name = max(words, key=len, default=None) if not re.search(r"\bMIG\b", device_kind) else None
    return None if name is None else table[name] * 1e12


def mfu(flops_per_second: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilization, from 0 to 1; None if an argument is unknown. Both per device, or both in total."""
    return flops_per_second / peak if flops_per_second is not None and peak else None
