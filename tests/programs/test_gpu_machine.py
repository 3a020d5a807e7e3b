"""Predicted times of GPU programs whose work is known by construction, and GPUs as targets."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections import Counter

import pytest
import yaml

from pax_recipes.gpt2 import gpt2_124m
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError, MissingError
from paxcli.programs.ahead_of_time import target_of
from paxcli.programs.estimate import count_work, find_rates, measure_mesh
from paxcli.programs.gpu_machine import (
    ATTENTION_RATES,
    LEAST_SECONDS,
    MATMUL_RATE,
    MEMORY_RATE,
    NVLINK_RATE,
    attention_flops,
    predict,
)
from paxcli.programs.gpus import GPUS
from paxcli.programs.hlo import read_program
from paxcli.programs.topologies import find_compile_target, hide_accelerators
from paxcli.training.session import build_session

PEAK = 989e12
RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"

# As XLA:GPU writes it: matmuls in bfloat16 and FP8, cuDNN's attention, an update of one layer's slice, and an
# all-gather that a matmul hides in part.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%product (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  ROOT %dot = bf16[4096,4096]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%product8 (c: f8e4m3fn[4096,4096], d: f8e4m3fn[4096,4096]) -> bf16[4096,4096] {
  %c = f8e4m3fn[4096,4096]{1,0} parameter(0)
  %d = f8e4m3fn[4096,4096]{1,0} parameter(1)
  ROOT %dot8 = bf16[4096,4096]{1,0} dot(%c, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (saved: bf16[32,4096,4096], row: bf16[1,4096,4096], i: s32[]) -> bf16[32,4096,4096] {
  %saved = bf16[32,4096,4096]{2,1,0} parameter(0)
  %row = bf16[1,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %updated = bf16[32,4096,4096]{2,1,0} dynamic-update-slice(%saved, %row, %i, %i, %i)
}

%scale (e: f32[8]) -> f32[8] {
  %e = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} add(%e, %e)
}

ENTRY %main (x: bf16[4096,4096], y: f8e4m3fn[4096,4096], q: bf16[2,4096,32,128]) -> bf16[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  %y = f8e4m3fn[4096,4096]{1,0} parameter(1)
  %q = bf16[2,4096,32,128]{3,2,1,0} parameter(2)
  %s = bf16[32,4096,4096]{2,1,0} parameter(3)
  %r = bf16[1,4096,4096]{2,1,0} parameter(4)
  %n = s32[] parameter(5)
  %v = f32[8]{0} parameter(6)
  %gather = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %mm = bf16[4096,4096]{1,0} fusion(%x, %x), kind=kCustom, calls=%product, metadata={op_name="jit(step)/mlp/dot_general"}
  %whole = bf16[4096,4096]{1,0} all-gather-done(%gather)
  %mm8 = bf16[4096,4096]{1,0} fusion(%y, %y), kind=kCustom, calls=%product8, metadata={op_name="jit(step)/mlp/dot_general"}
  %att = (bf16[2,32,4096,128]{3,1,2,0}, f32[2,32,4096]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={bf16[2,4096,32,128]{3,2,1,0}, bf16[2,4096,32,128]{3,2,1,0}, bf16[2,4096,32,128]{3,2,1,0}}, backend_config={"cudnn_fmha_backend_config":{"mask_type": "CAUSAL", "sliding_window_length": 0}}
  %start = ((bf16[32,4096,4096]{2,1,0}, bf16[1,4096,4096]{2,1,0}, s32[]), bf16[32,4096,4096]{2,1,0}, u32[]) fusion-start(%s, %r, %n), kind=kLoop, calls=%update
  %done = bf16[32,4096,4096]{2,1,0} fusion-done(%start)
  %small = f32[8]{0} fusion(%v), kind=kLoop, calls=%scale
  ROOT %other = bf16[4096,4096]{1,0} custom-call(%x), custom_call_target="my_kernel"
}
"""  # noqa: E501


def test_each_part_takes_its_share_of_the_roofline() -> None:
    gpu = GPUS["h200"]
    found = predict(read_program(PROGRAM), gpu, 8, PEAK)
    matmul = 2 * 4096**3 / (MATMUL_RATE * PEAK)
    assert found.parts["matmul"] == pytest.approx(matmul + matmul / 2)
    attention = 2 * 2 * 2 * 32 * 4096**2 * 128 / 2  # two matmuls, half of them hidden
    assert found.parts["kernels"] == pytest.approx(attention / (ATTENTION_RATES[256][0] * PEAK))
    assert found.kernel_calls == {"cudnn": 1, "my_kernel": 1} and found.unknown_kernels == {"my_kernel": 1}
    update = 2 * 4096 * 4096 * 2 / (MEMORY_RATE * gpu.hbm)  # of the slice alone
    assert found.parts["other"] == pytest.approx(update + LEAST_SECONDS, rel=1e-3)
    gather = 4096 * 4096 * 2 * 7 / 8 / (NVLINK_RATE * gpu.nvlink)
    assert found.communication["nvlink"] == pytest.approx(gather)
    assert found.parts["exposed_nvlink"] == pytest.approx(max(0.0, gather - matmul))


@pytest.mark.parametrize(
    "call",
    [
        '(bf16[4096,4096]{1,0}, s8[33554432]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        "bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ],
)
def test_calls_of_cublas_and_matmuls_alone_count_as_those_in_fusions(call: str) -> None:
    fused = "bf16[4096,4096]{1,0} fusion(%x, %x), kind=kCustom, calls=%product"
    assert fused in PROGRAM
    found, expected = (
        predict(read_program(program), GPUS["h200"], 8, PEAK) for program in (PROGRAM.replace(fused, call), PROGRAM)
    )
    assert found.parts["matmul"] == expected.parts["matmul"] and found.unknown_kernels == expected.unknown_kernels


def test_float32_is_multiplied_at_half_the_speed() -> None:
    bfloat16, float32 = (
        predict(read_program(PROGRAM.replace("bf16", dtype)), GPUS["h200"], 8, PEAK).parts["matmul"]
        for dtype in ("bf16", "f32")
    )
    assert float32 - bfloat16 == pytest.approx(2 * 4096**3 / (MATMUL_RATE * PEAK))


@pytest.mark.parametrize(
    ("target", "config", "share"),
    [
        ("__cudnn$fmhaSoftmaxBackward", '"mask_type": "CAUSAL", "sliding_window_length": 0', 2.5 / 2),
        ("__cudnn$fmhaSoftmax", '"mask_type": "NO_MASK", "sliding_window_length": 0', 1),
        ("__cudnn$fmhaSoftmax", '"mask_type": "CAUSAL", "sliding_window_length": 512', 1 / 8),
    ],
)
def test_attention_counts_what_its_mask_leaves(target, config, share) -> None:
    text = PROGRAM.replace("__cudnn$fmhaSoftmax", target).replace(
        '"mask_type": "CAUSAL", "sliding_window_length": 0', config
    )
    (kernel,) = (one for one in read_program(text).computations["main"] if one.name == "att")
    flops, rate = attention_flops(kernel)
    assert flops == 2 * 2 * 2 * 32 * 4096**2 * 128 * share
    assert rate == ATTENTION_RATES[256]["Backward" in target]


def test_the_measured_steps_are_within_the_stated_error() -> None:
    rows = json.loads((RESULTS / "gpu_h200.json").read_text())["predictions"]  # those that chose the rates
    later = json.loads((RESULTS / "gpu_h200_peers.json").read_text())
    latest = json.loads((RESULTS / "gpu_h200_epilogues.json").read_text())
    runs = [*later["recipes"].values(), later["llama2-7b_everything"], *latest["recipes"].values()]
    rows += [run["pax"] | {"predicted_step_seconds": run["predicted_step_seconds"]} for run in runs] + latest["steps"]
    newest = json.loads((RESULTS / "gpu_h200_7b.json").read_text())
    rows += [newest["runs"][0]["llama2-7b"][name] for name in ("pax", "pax_fp8")] + newest["not_kept"]
    errors = [abs(row["predicted_step_seconds"] / row["step_seconds"] - 1) for row in rows]
    assert len(errors) == 20 and max(errors) <= GPUS["h200"].error


def test_gpus_by_their_model() -> None:
    target = find_compile_target("h100:8")
    assert (target.platform, target.devices_per_slice, target.is_local_gpu) == ("gpu", 8, False)
    assert 0.91 < target.hbm_bytes / 84_942_979_072 < 0.93
    assert find_compile_target("gpu:8").is_local_gpu
    for name, slices in (("h100:9", 1), ("h100:0", 1), ("h100:8", 2)):
        with pytest.raises(ConfigError, match="not the GPUs of one machine"):
            find_compile_target(name, slices)
    with pytest.raises(ConfigError, match="not a topology") as caught:
        find_compile_target("h300:8")
    assert "a100, h100, h200, b200" in caught.value.hint


def test_the_mesh_has_as_many_gpus_as_the_target() -> None:
    config = gpt2_124m()
    config.mesh.ici_mesh_shape = [1, 4, 1]
    with pytest.raises(ConfigError, match="h200:8 has 8 devices; the recipe's mesh has 4"):
        target_of(config, "h200:8", None)
    assert target_of(config, "h200:4", None).gpu is GPUS["h200"]


def test_without_the_plugin_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="CUDA plugin") as caught:
        find_compile_target("h200:1").devices()
    assert "jax[cuda13]" in caught.value.hint


def test_a_step_for_other_gpus_is_not_saved(pax) -> None:
    done = pax("compile", "gpt2-124m", "--overlay=gpu-1", "--topology=h200:1", "--save=step", "--json")
    assert done.returncode == 2 and "--topology gpu:1" in json.loads(done.stdout)["error"]["hint"]


@pytest.mark.cuda
def test_a_recipe_is_compiled_for_gpus_that_are_not_here(pax) -> None:
    """For one GPU with remat in unrolled layers, and sharded over eight."""
    small = ("--set=num_layers=2", "--set=loss_chunk=null", "--json")
    one = pax("compile", "llama-1b", "--overlay=gpu-1", "--topology=h200:1", *small)
    assert one.returncode == 0, one.stderr
    report = json.loads(one.stdout)
    assert report["fits"] and report["kernels"] == {"cudnn": 4} and report["left_out"] == []
    assert 0.3 < report["predicted_mfu"] < 0.7 and report["shares"]["exposed_nvlink"] == 0
    eight = pax("compile", "llama-1b", "--overlay=gpu-8", "--topology=h100:8", *small)
    report = json.loads(eight.stdout)
    assert {one["kind"] for one in report["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert report["communication_seconds"]["nvlink"] > 0 and report["num_devices"] == 8


def test_fp8_is_faster_from_hopper_on() -> None:
    rates = {name: find_rates(find_compile_target(f"{name}:8")) for name in GPUS}
    assert {name: one.fp8_speed for name, one in rates.items()} == {"a100": 1, "h100": 2, "h200": 2, "b200": 2}
    assert rates["b200"].link == 2 * rates["h200"].link == 0.8 * 900e9


@pytest.mark.cuda
def test_cublas_adds_the_biases_of_gpt2_and_computes_its_gelu(tmp_path, pax) -> None:
    small = ("--overlay=gpu-1", "--topology=h200:1", "--set=num_layers=2", "--set=loss_chunk=null")
    done = pax("compile", "gpt2-124m", *small, "--hlo=step.hlo", "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    epilogues = Counter(re.findall(r'"epilogue":"(\w+)"', (tmp_path / "step.hlo").read_text()))
    # In each layer: queries, keys, values and the two output projections; and the hidden units.
    assert epilogues["BIAS"] == 2 * 5 and epilogues["BIAS_GELU_AUX"] == 2


@pytest.mark.cuda
def test_a_search_ranks_what_fits(tmp_path, pax) -> None:
    small = ("--overlay=gpu-8", "--topology=h100:8", "--set=num_layers=2", "--set=percore_batch_size=8")
    done = pax("compile", "llama-1b", *small, "--search", "--save=best.yaml", "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    ranked = json.loads(done.stdout)["ranked"]
    speeds = [one["predicted_tokens_per_second"] for one in ranked if one["fits"]]
    assert len(ranked) > 3 and speeds == sorted(speeds, reverse=True)
    best = ranked[0]["settings"]
    assert best and yaml.safe_load((tmp_path / "best.yaml").read_text()) == best


@pytest.mark.cuda
def test_the_estimate_counts_the_attention_of_cudnn() -> None:
    hide_accelerators()
    target = find_compile_target("h100:8")
    with build_session(resolve("llama-1b", ["gpu-8"], ["num_layers=2"]).config, target.devices()).active() as session:
        model, mesh = session.experiment.task.model, measure_mesh(session, target)
        assert count_work(session).attention_flops == 3.5 * model.forward_flops(session.spec).attention
    assert mesh.gather > 0 and mesh.exchange == 0


@pytest.mark.cuda
def test_a_machine_with_the_plugin_but_no_gpu_trains_on_its_cpu(pax) -> None:
    done = pax("train", "tiny-synthetic", "--set=num_train_steps=2", "--set=eval_inputs=[]", "--run-dir=run", "--json")
    assert done.returncode == 0 and "cuda" not in done.stderr.lower(), done.stderr
