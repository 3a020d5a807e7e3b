"""Peak FLOP/s of devices, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import re

# Dense TFLOP/s of one JAX device, from the vendors' data sheets. A device is half a chip for TPU v2, v3 and 7x, and a
# chip for v4, as on Cloud TPU. Devices whose published figures disagree are left out.
_TPU_BF16 = {
    "TPU v2": 23.0,
    "TPU v3": 61.5,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 1153.5,
}
_GPU_BF16 = {
    "A10": 125.0,
    "A100": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.0,
    "H200 NVL": 836.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
}
_GPU_FP16 = {"V100-SXM2": 125.0, "V100-PCIE": 112.0, "T4": 65.0}

_TPU = {"bfloat16": _TPU_BF16}
_GPU = {"bfloat16": _GPU_BF16, "float16": _GPU_FP16}


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak of one JAX device in FLOP/s; None if unknown, never a guess.

    Args:
      device_kind: `jax.Device.device_kind`, such as `NVIDIA H200`.
      dtype: NumPy's name of the type of the factors of a matmul.
    """
    tflops = _TPU.get(dtype, {}).get(device_kind)
    if tflops is None:
        tflops = _gpu_tflops(device_kind, _GPU.get(dtype, {}))
    return None if tflops is None else tflops * 1e12


def _gpu_tflops(device_kind: str, table: dict[str, float]) -> float | None:
    """TFLOP/s of the longest name in `table` that `device_kind` contains as words. A MIG slice is not the full GPU."""
    if re.search(r"\bMIG\b", device_kind):
        return None
    found = [name for name in table if re.search(rf"\b{re.escape(name)}\b", device_kind, re.IGNORECASE)]
    return table[max(found, key=len)] if found else None


def mfu(flops_per_second: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilization, from 0 to 1; None if an argument is unknown. Both per device, or both in total."""
    return flops_per_second / peak if flops_per_second is not None and peak else None
