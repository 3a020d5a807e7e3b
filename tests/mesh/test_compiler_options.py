from __future__ import annotations

import subprocess

import pytest

from paxcli.errors import ConfigError
from paxcli.log import log
from paxcli.mesh import compiler_options as room
from paxcli.mesh.compiler_options import compiler_options

H200 = ("gpu", "NVIDIA H200")
# Recommended for years, some of them in scripts of today; as XLA_FLAGS, each ends a process of a current jaxlib.
GONE = [
    "xla_gpu_graph_level",
    "xla_gpu_enable_triton_softmax_fusion",
    "xla_gpu_simplify_all_fp_conversions",
    "xla_gpu_enable_async_all_reduce",
    "xla_gpu_enable_async_all_gather",
    "xla_gpu_enable_async_reduce_scatter",
    "xla_gpu_enable_async_collectives",
    "xla_gpu_lhs_enable_gpu_async_tracker",
    "xla_gpu_enable_custom_fusions",
    "xla_gpu_enable_address_computation_fusion",
    "xla_gpu_enable_nccl_per_stream_comms",
    "xla_gpu_cudnn_gemm_fusion",
]


@pytest.fixture(autouse=True)
def _own_cache_and_no_options_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_presets_skip_options_that_xla_has_removed(monkeypatch, caplog):
    """All of pax's own options for GPUs exist; those that are gone are left out by name. Asked once for a version."""
    monkeypatch.setattr(log, "propagate", True)
    expected = room._presets(*H200, num_devices=2)
    outdated = {"platform": "gpu", "from": "0.1", "options": dict.fromkeys(GONE, True)}
    monkeypatch.setattr(room, "_PRESETS", [*room._PRESETS, outdated])
    assert compiler_options(*H200) == expected and len(expected) >= 5
    assert all(name in caplog.text for name in GONE) and "No such compile option" in caplog.text
    monkeypatch.setattr(subprocess, "run", None)
    assert compiler_options(*H200) == expected


def test_options_of_the_recipe_and_of_the_environment_come_first(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    gone, live = GONE[0], "xla_gpu_graph_min_graph_size"
    with pytest.raises(ConfigError, match=f"{gone}=0: .*No such compile option"):
        compiler_options(*H200, {gone: 0, live: 3})
    options = compiler_options(*H200, {live: 3, "xla_gpu_enable_while_loop_double_buffering": None})
    assert options[live] == 3
    assert "xla_gpu_enable_latency_hiding_scheduler" not in options
    assert "xla_gpu_enable_while_loop_double_buffering" not in options


def test_each_device_kind_has_its_options(monkeypatch):
    """By generation, version and number."""
    monkeypatch.setattr(room, "_option_errors", lambda platform, options: dict.fromkeys(options))
    monkeypatch.setattr(room, "_package", lambda platform: "libtpu 0.0.42.1" if platform == "tpu" else "jaxlib 0.10.2")
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    assert all(fused in compiler_options("tpu", kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite"))
    assert "xla_tpu_scoped_vmem_limit_kib" in compiler_options("tpu", "TPU v6 lite", num_devices=1)
    assert compiler_options(*H200, num_devices=1) == {}
    assert compiler_options("cpu", "cpu", num_devices=1)["xla_backend_optimization_level"] == 2
    monkeypatch.setattr(room, "_package", lambda platform: "libtpu 0.0.41")
    assert fused not in compiler_options("tpu", "TPU v5")  # this version rejects it there
    monkeypatch.setattr(room, "_package", lambda platform: "libtpu 0.0.43")
    assert fused in compiler_options("tpu", "TPU v5 lite")
    assert not any(fused in compiler_options("tpu", kind) for kind in ("TPU v5", "TPU v6 lite"))
    monkeypatch.setattr(room, "_package", lambda platform: "libtpu 0.0.7")
    assert compiler_options("tpu", "TPU v5 lite") == {}


@pytest.mark.tpu
@pytest.mark.slow
def test_libtpu_knows_the_options_of_each_generation(caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"):
        assert compiler_options("tpu", kind)
    assert not caplog.text
