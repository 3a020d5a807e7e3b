from __future__ import annotations

import jax
import pytest

from paxcli.metrics.peaks import mfu, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("TPU v2", 23),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
    ],
)
def test_bf16_peak_of_a_device(device_kind, tflops):
    assert peak_flops(device_kind) == tflops * 1e12


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "",
        "TPU v4 lite",  # not the v4 of the table
        "TPU v9",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA RTX A1000",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090",
        "Tesla V100-SXM2-16GB",  # no bf16
        "Tesla T4",
    ],
)
def test_unknown_device_has_no_peak(device_kind):
    assert peak_flops(device_kind) is None


def test_other_dtypes():
    assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
    assert peak_flops("Tesla V100-PCIE-32GB", "float16") == 112e12
    assert peak_flops("Tesla T4", "float16") == 65e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("TPU v4", "int4") is None


def test_this_machines_cpu_has_no_mfu():
    assert mfu(1e9, peak_flops(jax.devices("cpu")[0].device_kind)) is None


def test_mfu():
    assert mfu(494.5e12, peak_flops("NVIDIA H200")) == 0.5
    assert mfu(None, 1e12) is None
    assert mfu(1e12, None) is None
