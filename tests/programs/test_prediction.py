"""Predicted times of programs whose compute and communication are known by construction."""

from __future__ import annotations

import dataclasses

import pytest

from paxcli.programs.chips import CHIPS
from paxcli.programs.collectives import Interconnect
from paxcli.programs.hlo import read_program
from paxcli.programs.tpu_machine import KERNEL_RATE, SLICE_WAIT, predict
from tests.programs.hlo_texts import BETWEEN_SLICES, COLLECTIVES, MIB, ON_HOST, SPARSE_CORE, TPU7X, V4


def test_seconds_are_matmuls_and_exposed_communication() -> None:
    link, matmul = 45e9, 2 * 512 * 1024 * 1024 / (CHIPS["v4"].matmul_rate * 275e12)
    gather = 2 * MIB * 3 / 4 / link  # in a row of four: over one link
    reduce = 2 * (2 * MIB * 3 / 4) / (2 * link)  # in a group over both axes: over two links
    permute = MIB / 2 / link - matmul  # the fusion between its start and its done hides a part
    found = predict(read_program(COLLECTIVES), V4, 275e12)
    assert found.parts["matmul"] == pytest.approx(5 * matmul)
    assert found.parts["attention"] == pytest.approx(matmul)
    assert found.parts["exposed_ici"] == pytest.approx(5 * (gather + reduce) + permute)
    assert found.parts["exposed_dcn"] == 0 and found.parts["kernels"] == 0
    assert sum(found.shares().values()) == pytest.approx(1)


def test_a_loop_hides_transfers_while_its_own_leave_the_link_free() -> None:
    (start,) = (line for line in COLLECTIVES.splitlines(keepends=True) if "collective-permute-start" in line)
    larger = start.replace("bf16[256,", "bf16[2048,")
    before_loop = COLLECTIVES.replace(start, "").replace("  %loop =", f"{larger}  %loop =")
    matmul = 2 * 512 * 1024 * 1024 / (CHIPS["v4"].matmul_rate * 275e12)
    inside = 5 * 2 * (2 * MIB * 3 / 4 / 45e9)  # of a gather and a reduction in each iteration; none is hidden
    exposed = predict(read_program(before_loop), V4, 275e12).parts["exposed_ici"]
    assert exposed == pytest.approx(inside + 4 * MIB / 45e9 - 6 * matmul)  # five in the loop, one after it


def test_matmuls_in_fp8_and_collectives_on_sparse_cores() -> None:
    matmul = 2 * 512 * 1024 * 1024 / (CHIPS["tpu7x"].matmul_rate * 1153.5e12)
    gather = MIB * 3 / 4 / (90e9 / 2)  # in a row of four; the other device of each chip uses the same link
    found = predict(read_program(SPARSE_CORE), TPU7X, 1153.5e12)
    assert found.parts["matmul"] == pytest.approx(matmul / 2 + matmul)
    assert found.communication["ici"] == pytest.approx(gather)
    assert found.parts["exposed_ici"] == pytest.approx(gather - matmul / 2)
    bfloat16 = predict(read_program(SPARSE_CORE), dataclasses.replace(TPU7X, generation="v6e"), 1153.5e12)
    assert bfloat16.parts["matmul"] == pytest.approx(2 * matmul)  # without FP8 units


def test_the_explanation_names_what_bounds_the_step_and_where() -> None:
    prediction = predict(read_program(COLLECTIVES), V4, 275e12)
    found = prediction.explain()
    assert set(found["bounds"]) == {"matmul", "ici"} and "remat" in found["bounds"]["matmul"]["change"]
    assert sum(one["share"] for one in found["bounds"].values()) == pytest.approx(1)
    assert sum(one["seconds"] for one in found["costs"]) == pytest.approx(prediction.seconds)
    largest, *_ = found["costs"]
    assert largest["bound"] == "ici" and largest["what"] == "all-reduce, 2 MB"
    assert {"bound": "matmul", "layer": "mlp", "what": "dot"}.items() <= found["costs"][2].items()
    assert len(prediction.explain(2)["costs"]) == 2


def test_what_remat_repeats_is_marked_and_only_that_asks_for_a_policy_that_saves_more() -> None:
    repeated = COLLECTIVES.replace("jit(step)/mlp/dot", "jit(step)/checkpoint/rematted_computation/mlp/dot")
    matmuls = [
        [one for one in predict(read_program(text), V4, 275e12).explain()["costs"] if one["bound"] == "matmul"]
        for text in (COLLECTIVES, repeated)
    ]
    assert [[(one["layer"], one["what"]) for one in found] for found in matmuls] == [
        [("mlp", "dot"), ("attention", "dot")],
        [("mlp", "dot, repeated by remat"), ("attention", "dot")],
    ]


def test_an_operation_of_no_known_source_has_the_name_of_its_opcode() -> None:
    unknown = COLLECTIVES.replace('metadata={op_name="jit(step)/mlp/dot"}, ', "")
    costs = predict(read_program(unknown), V4, 275e12).explain()["costs"]
    assert {"layer": "", "what": "fusion"}.items() <= next(one for one in costs if one["bound"] == "matmul").items()


def test_each_doubling_of_slices_waits_for_the_slowest() -> None:
    four = Interconnect("v4", [(s, x, 0, 0) for s in range(4) for x in range(2)], (2, 1, 1), (False,) * 3)
    found = predict(read_program(COLLECTIVES), four, 275e12)
    (wait,) = (seconds for cost, seconds in found.costs.items() if "slowest" in cost.what)
    assert wait == pytest.approx(2 * SLICE_WAIT * (found.seconds - wait))


def test_kernels_and_host_transfers_are_modelled() -> None:
    found = predict(read_program(ON_HOST), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(3 / 4 * 2 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))
    assert found.parts["exposed_host"] == found.communication["host"] == pytest.approx(2 * (2 * 512 * 128 * 2) / 15e9)
    assert not found.unknown_kernels and found.parts["exposed_ici"] == 0


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("gmm.4", "bf16[512,256]{1,0}, bf16[8,256,384]{2,1,0}"),
        ("gmm", "bf16[512,256]{1,0}, bf16[8,384,256]{2,1,0}"),  # its matrices transposed
        ("tgmm.1", "bf16[512,256]{1,0}, bf16[512,384]{1,0}"),
    ],
)
def test_grouped_matmuls_multiply_each_row_once(name: str, operands: str) -> None:
    call = f'ROOT %{name} = bf16[512,384]{{1,0}} custom-call(%p), custom_call_target="tpu_custom_call"'
    sizes = "s32[9]{0}, s32[12]{0}, s32[1]{0}"
    program = f"""HloModule m, is_scheduled=true

ENTRY %main (p: bf16[512,256]) -> bf16[512,384] {{
  %p = bf16[512,256]{{1,0}} parameter(0)
  {call}, operand_layout_constraints={{{sizes}, {operands}}}, metadata={{}}
}}
"""
    found = predict(read_program(program), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(2 * 512 * 256 * 384 / (KERNEL_RATE * 275e12))
    assert not found.unknown_kernels


def test_collectives_between_slices_go_over_dcn() -> None:
    slices = Interconnect("v4", [(s, x, 0, 0) for s in range(2) for x in range(4)], (4, 1, 1), (False,) * 3)
    found = predict(read_program(COLLECTIVES), slices, 275e12)
    # The group of every second device has members in both slices; so has the permute. Four devices share 25 GB/s.
    over_dcn = 5 * 2 * (2 * MIB * 3 / 4) + MIB / 2
    assert found.communication["dcn"] == pytest.approx(over_dcn / (25e9 / 4))


def test_what_hosts_exchange_between_slices_is_of_full_arrays() -> None:
    slices = Interconnect("v4", [(s, x, 0, 0) for s in range(2) for x in range(4)], (4, 1, 1), (False,) * 3)
    half = MIB  # of 2 MiB: what a device of each slice receives in either collective
    found = predict(read_program(BETWEEN_SLICES), slices, 275e12)
    assert found.communication["dcn"] == pytest.approx(2 * half / CHIPS["v4"].dcn)


@pytest.mark.parametrize(
    ("grid", "share"),
    [((2, 2), 3 / 4), ((8, 8), 36 / 64), ((8, 2), 15 / 64), ((2, 8), 15 / 64)],  # the last two: a window of two blocks
)
def test_attention_multiplies_the_blocks_that_the_mask_leaves(grid: tuple[int, int], share: float) -> None:
    program = ON_HOST.replace("s8[1,2,2]", f"s8[1,{grid[0]},{grid[1]}]")
    found = predict(read_program(program), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(share * 2 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))


@pytest.mark.parametrize("segments", ["", ", s32[512,128]{1,0}, s32[8,512]{1,0}"])
@pytest.mark.parametrize(("positions", "share"), [("", 1), (", s32[512,128]{1,0}", 3 / 4)])
def test_attention_without_a_mask_multiplies_all_blocks(segments: str, positions: str, share: float) -> None:
    """Only a mask reads the positions of the queries."""
    program = ON_HOST.replace(", s32[512,128]{1,0}", segments + positions)
    found = predict(read_program(program), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(share * 2 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))


def test_blocks_of_keys_may_be_larger_than_those_of_queries() -> None:
    sizes = r'metadata={"{\"block_q_dkv\": 64, \"block_kv_dkv\": 128}"}'
    program = ON_HOST.replace("splash_mha_fwd", "splash_mha_dkv").replace("metadata={}", sizes)
    found = predict(read_program(program.replace("s8[1,2,2]", "s8[1,8,4]")), V4, 275e12)
    share = (1 + 1 + 2 + 2 + 3 + 3 + 4 + 4) / 32
    assert found.parts["kernels"] == pytest.approx(share * 4 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))


def test_with_context_parallelism_a_device_has_its_share_of_the_blocks() -> None:
    program = ON_HOST.replace("s8[1,2,2]{2,1,0}, bf16[2,512,128]", "s8[1,4,8]{2,1,0}, bf16[2,256,128]")
    program = program.replace("metadata={}", r'metadata={"{\"block_q\": 64, \"block_kv\": 64}"}')
    found = predict(read_program(program), V4, 275e12)
    share = 36 / 64  # of the causal mask of the whole row, 8 x 8 blocks
    assert found.parts["kernels"] == pytest.approx(share * 2 * 2 * 2 * 256 * 512 * 128 / (KERNEL_RATE * 275e12))


@pytest.mark.parametrize(("query_gradient", "matmuls"), [("bf16[4,2,512,128]{3,2,1,0}, ", 5), ("", 4)])
def test_a_backward_kernel_may_compute_the_gradient_of_queries_too(query_gradient: str, matmuls: int) -> None:
    sums, grads = ", ".join(["f32[512,128]{1,0}"] * 2), ", ".join(["bf16[2,512,128]{2,1,0}"] * 2)
    results = f"({sums}, {query_gradient}{grads}) custom-call"
    forward = "(f32[512,128]{1,0}, bf16[2,512,128]{2,1,0}) custom-call"
    program = ON_HOST.replace(forward, results).replace("splash_mha_fwd", "splash_mha_dkv")
    found = predict(read_program(program), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(3 / 4 * matmuls * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))
