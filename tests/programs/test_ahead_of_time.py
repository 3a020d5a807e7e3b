"""Steps compiled by the real TPU compiler."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.layers.scopes import ATTENTION
from paxcli.programs import ahead_of_time
from paxcli.programs.ahead_of_time import describe_shortage, read_step
from paxcli.programs.attribution import attribute_instructions
from paxcli.programs.hlo import read_program
from paxcli.programs.roofline import matmul_flops
from paxcli.programs.topologies import find_compile_target, hide_accelerators
from tests.programs.hlo_texts import COLLECTIVES

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64 only"
)

# A topology, the mesh on it, and how many slices.
FP8 = "tpu7x:2x2x1=[1,8,1]+precision=fp8"
V4 = "v4:2x2x1=[1,4,1]"
TWO_SLICES = "v4:2x2x1*2=[1,4,1]"
SLICES = (V4, TWO_SLICES)
MORE_SLICES = (FP8, "v5e:4x4=[1,8,2]", "v5p:2x2x1=[1,4,1]", "v6e:2x2=[1,2,2]")
EACH = [*SLICES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_SLICES)]

OFFLOADED = f"{V4}+remat_policy=context+offload=[layer_input,query]"
EXPERTS = "v4:2x2x1={fsdp: 2, expert: 2}+feed_forward=MoeFeedForward+num_experts=8"


def report_of(name: str) -> dict[str, Any]:
    """The report of a program. One process compiles those of the fast tests, another those of the slow ones."""
    fast = (*SLICES, OFFLOADED)
    return _reports(fast if name in fast else (*MORE_SLICES, EXPERTS))[name]


@functools.cache
def _reports(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.programs.tpu_programs", *names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, json.loads(done.stdout), strict=True))


@needs_libtpu
@pytest.mark.parametrize("name", EACH)
def test_a_small_model_compiles_for_a_slice(name) -> None:
    report = report_of(name)
    assert report["fits"] and report["hbm_needed_bytes"] < report["hbm_available_bytes"]
    # The new state reuses the memory of every array of the old one.
    assert report["memory"]["alias_bytes"] >= report["state_bytes_per_device"]
    # Parameters are gathered one layer at a time, and attention runs on the kernel.
    assert report["stacked_all_gathers"] == []
    assert report["kernels"]["splash_mha_fwd_segmented_residuals"] >= 6 and report["left_out"] == []
    assert 0 < report["predicted_mfu"] < 1
    assert sum(report["shares"].values()) == pytest.approx(1)
    assert sum(one["share"] for one in report["bounds"].values()) == pytest.approx(1)
    assert any(one["layer"].startswith("stack/layers/") for one in report["costs"])
    moved = {(one["kind"], one["network"]): one for one in report["collectives"]}
    assert moved["all-gather", "ici"]["count"] >= 3 * 6  # six matrices a layer, forward at least
    found = attribute_instructions(read_program(report["text"])).values()
    assert {"attention", "matmul", "norm", "collective"} <= {one.category for one in found}
    assert not [one for one in found if one.category == "matmul" and one.layer.endswith(f"/{ATTENTION}")]
    assert [net for _, net in moved if net == "dcn"] == (["dcn"] if "*" in name else [])


@needs_libtpu
@pytest.mark.parametrize("name", EACH)
def test_flops_of_fusions_are_those_that_the_compiler_counts(name) -> None:
    program = read_program(report_of(name)["text"])
    found = sum(matmul_flops(program, one) for one, _ in program.scheduled_instructions())  # of loops, one iteration
    assert 0.95 < found / report_of(name)["compiler_flops_per_device"] < 1  # the rest is elementwise


@needs_libtpu
@pytest.mark.slow
def test_matmuls_of_weights_have_fp8_operands() -> None:
    program = read_program(report_of(FP8)["text"])
    found = [[matmul_flops(program, one, speed) for one, _ in program.scheduled_instructions()] for speed in (1, 2)]
    assert 0.5 < sum(found[1]) / sum(found[0]) < 0.6  # attention and logits are not in FP8


@needs_libtpu
def test_each_gradient_is_reduced_between_slices_once() -> None:
    report = report_of(TWO_SLICES)
    (between,) = [one for one in report["collectives"] if one["network"] == "dcn"]
    gradients = report["parameters_bytes_per_device"] / 2  # of one device, in bfloat16
    assert between["kind"] == "all-reduce"
    assert 0.9 * gradients < between["bytes"] < 2.1 * gradients


@needs_libtpu
def test_offloaded_activations_are_in_host_memory() -> None:
    report = report_of(OFFLOADED)
    size = 2 * 4 * 256 * 256  # of each activation of a layer on one device: rows × tokens × features in bfloat16
    assert report["fits"] and report["memory"]["host_bytes"] == 2 * 3 * size
    assert report["host_available_bytes"] == 102e9
    moved = report["host_transfers"]["bytes"]
    assert 2 * 2 * 3 * size <= moved <= 2 * 2 * 4 * size  # there and back; XLA moves one more where it pipelines
    assert report["communication_seconds"]["host"] == pytest.approx(moved / 15e9)
    assert report_of(V4)["host_transfers"] == {"count": 0, "bytes": 0}


@needs_libtpu
@pytest.mark.slow
def test_experts_run_on_grouped_matmul_kernels() -> None:
    report = report_of(EXPERTS)
    # Three matrices in each of three layers: forward, two again in the backward pass, the gradients of both operands.
    assert {name: report["kernels"][name] for name in ("gmm", "tgmm")} == {"gmm": 3 * (3 + 2 + 3), "tgmm": 3 * 3}
    assert report["left_out"] == []


@needs_libtpu
def test_the_program_of_another_trainer_is_read_the_same_way(tmp_path) -> None:
    report = report_of(V4)
    (tmp_path / "step.txt").write_text(report["text"])
    command = [sys.executable, str(ROOT / "benchmarks" / "tpu_aot.py"), "--hlo", str(tmp_path / "step.txt")]
    command += ["--topology", "v4:2x2x1", "--flops", str(report["flops_per_step"] / 4)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert found["predicted_mfu"] > 0 and found == {name: report[name] for name in found}


@needs_libtpu
def test_the_recipe_chooses_what_mfu_is_of_and_not_how_fast_devices_are() -> None:
    hide_accelerators()
    target, program = find_compile_target("v4-16"), read_program(COLLECTIVES)
    devices = target.devices()
    once, twice = (read_step(program, target, devices, peak, 1e12) for peak in (275e12, 2 * 275e12))
    assert twice["predicted_step_seconds"] == once["predicted_step_seconds"]
    assert twice["predicted_mfu"] == pytest.approx(once["predicted_mfu"] / 2)


def test_a_cpu_has_no_prediction_to_explain(pax) -> None:
    done = pax("compile", "tiny", "--topology", "cpu:1", "--explain")
    assert done.returncode == 2 and "no step-time prediction for cpu:1" in done.stderr


def test_the_decode_step_is_the_program_that_decoding_runs(pax, tmp_path) -> None:
    """On a CPU, with unrolled layers."""
    small = (
        "--set=num_layers=2",
        "--set=model_dims=32",
        "--set=hidden_dims=32",
        "--set=max_seq_len=16",
        "--set=num_heads=4",
    )
    done = pax("compile", "tiny", "--topology=cpu:1", "--step=decode", "--hlo=step.txt", *small, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] and report["cache_bytes"] == 2 * 2 * 16 * 16 * 32 * 4  # keys and values of 16 prompts
    text = (tmp_path / "step.txt").read_text()
    assert "stack/layers_0/" in text and "stack/layers_1/" in text and "stack/layers/" not in text


def test_only_the_train_step_has_compiler_options() -> None:
    """As in a run: `pax eval` and `pax decode` compile their steps without."""
    sets = [
        "num_layers=1",
        "model_dims=32",
        "hidden_dims=32",
        "mesh.compiler_options={xla_backend_optimization_level: 0}",
    ]
    config = resolve("tiny-synthetic", sets=sets).config
    assert ahead_of_time.compile_ahead(config, find_compile_target("cpu:1"), "eval").report["compiler_options"] == {}


@pytest.mark.parametrize("option", ["--hlo", "--save"])
def test_a_full_disk_does_not_lose_the_report(pax, option) -> None:
    done = pax("compile", "tiny-synthetic", "--topology=cpu:1", "--set=num_layers=1", f"{option}=/dev/full", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 3 and report["fits"]
    assert report["error"]["message"] == "Cannot write /dev/full: no space left on the device."


@needs_libtpu
def test_the_error_says_how_much_memory_is_missing(pax) -> None:
    much = ("--set", "task.train.percore_batch_size=65536", "--set", "train_input=SyntheticInput")
    sizes = ("--set=num_layers=1", "--set=model_dims=256", "--set=hidden_dims=1024")
    done = pax("compile", "tiny", "--topology", "v5e-1", *much, *sizes, "--json")
    assert done.returncode == 2, done.stderr
    result = json.loads(done.stdout)
    assert not result["fits"] and result["hbm_needed_bytes"] > result["hbm_available_bytes"]
    assert [result[name] for name in ("predicted_step_seconds", "predicted_mfu", "collectives")] == [None] * 3
    assert "GiB too much" in result["error"]["message"] and "--search" in result["error"]["hint"]


def test_offloaded_activations_have_to_fit_in_the_memory_of_the_host() -> None:
    names = ("argument", "output", "temp", "alias", "generated_code")
    stats = {f"{name}_size_in_bytes": 1 << 30 for name in names} | {"peak_memory_in_bytes": 0}
    fits = {}
    for on_host in (48 * 10**9, 48 * 10**9 + 1):
        sizes = types.SimpleNamespace(**stats, host_temp_size_in_bytes=on_host)
        compiled: Any = types.SimpleNamespace(memory_analysis=lambda sizes=sizes: sizes)
        session: Any = types.SimpleNamespace(abstract={})
        fits[on_host] = ahead_of_time._memory(session, compiled, find_compile_target("v5e-4"))["fits"]
    assert list(fits.values()) == [True, False]


def test_the_memory_of_a_program_on_a_cpu_has_its_temporaries() -> None:
    compiled = jax.jit(lambda x: jnp.sort(jnp.outer(x, x), axis=0).sum()).lower(jnp.ones(512)).compile()
    session: Any = types.SimpleNamespace(abstract={})
    memory = ahead_of_time._memory(session, compiled, find_compile_target("cpu:1"))
    assert memory["hbm_needed_bytes"] >= 512 * 512 * 4


def test_a_program_that_does_not_fit_says_where() -> None:
    sizes = {"hbm_needed_bytes": 20 << 30, "hbm_available_bytes": 16 << 30}
    assert describe_shortage(sizes) == "it needs 20.00 GiB of each device's 16.00 GiB, 4.00 GiB too much"
    assert describe_shortage(sizes | {"hbm_needed_bytes": None}) == "it needs more memory than a device has"
    message = "the total memory required for HLO temporaries (15.75G) exceeds available HBM (15.75G)."  # libtpu's
    rounded = dict(zip(sizes, ahead_of_time._parse_out_of_memory(message), strict=True))
    assert describe_shortage(rounded) == "it needs more memory than a device has"
    on_host = {"hbm_needed_bytes": 9 << 30, "memory": {"host_bytes": 50 << 30}, "host_available_bytes": 48 * 10**9}
    expected = "it needs 50.00 GiB of each device's 44.70 GiB of host memory, 5.30 GiB too much"
    assert describe_shortage(sizes | on_host) == expected


def test_a_kernel_that_needs_more_vmem_is_not_called_a_program_without_memory(monkeypatch) -> None:
    def compile_nothing(lowered: Any, **options: Any) -> None:
        text = "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while …"
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_nothing)
    config = resolve("tiny-synthetic", sets=["num_layers=1"]).config
    with pytest.raises(ConfigError, match="rejects the program: .*memory space vmem") as failed:
        ahead_of_time.compile_ahead(config, find_compile_target("cpu:1", 1))
    assert "xla_tpu_scoped_vmem_limit_kib" in failed.value.hint
