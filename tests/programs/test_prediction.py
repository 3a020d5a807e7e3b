"""What a program sends and how often, read from the text of programs whose traffic is known by construction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paxcli.programs.collectives import Collective, Wiring, collective_of, count_collectives
from paxcli.programs.hlo import read_program
from paxcli.programs.host_transfers import count_host_transfers
from paxcli.programs.prediction import KERNEL_RATE, predict

# As XLA writes them out: a loop of five that gathers, reduces and scatters, then a begun and a finished permute.
TEXT = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%product (a: bf16[512,1024], b: bf16[1024,1024]) -> bf16[512,1024] {
  %a = bf16[512,1024]{1,0} parameter(0)
  %b = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot = bf16[512,1024]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%body (s: (s32[], bf16[256,1024])) -> (s32[], bf16[256,1024]) {
  %s = (s32[], /*index=1*/bf16[256,1024]{1,0}) parameter(0)
  %w = bf16[256,1024]{1,0} get-tuple-element(%s), index=1
  %whole = bf16[1024,1024]{1,0} all-gather(%w), channel_id=1, replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}
  %fused = bf16[512,1024]{1,0} fusion(%w, %whole), kind=kOutput, calls=%product, metadata={op_name="jit(step)/mlp/dot"}, backend_config={"window_config":{"estimated_cycles":"1050000"}}
  %g = bf16[1024,1024]{1,0} all-reduce(%whole), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  ROOT %out = (s32[], bf16[256,1024]{1,0}) tuple(%i, %w)
}

%condition (s.1: (s32[], bf16[256,1024])) -> pred[] {
  %s.1 = (s32[], bf16[256,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (p: bf16[256,1024]) -> bf16[256,1024] {
  %p = bf16[256,1024]{1,0} parameter(0)
  %loop = (s32[], bf16[256,1024]{1,0}) while(%p), condition=%condition, body=%body
  %on = (bf16[256,1024]{1,0}, bf16[256,1024]{1,0}, u32[]) collective-permute-start(%p), channel_id=3, source_target_pairs={{0,4},{4,0}}
  %meanwhile = bf16[512,1024]{1,0} fusion(%p, %p), kind=kLoop, calls=%product, metadata={op_name="jit(step)/attention/dot"}, backend_config={"window_config":{"estimated_cycles":"10500"}}
  ROOT %off = bf16[256,1024]{1,0} collective-permute-done(%on)
}
"""  # noqa: E501

# Two rows of four chips, a v4:4x2x1 that is open at its ends.
V4 = Wiring("v4", [(0, x, y, 0) for y in range(2) for x in range(4)], (4, 2, 1), (False,) * 3)
MIB = 1 << 20


def test_collectives_are_counted_with_their_loops() -> None:
    found = {one["kind"]: (one["count"], one["bytes"]) for one in count_collectives(read_program(TEXT), V4)}
    assert found == {
        "all-gather": (5, 5 * 2 * MIB),
        "all-reduce": (5, 5 * 2 * MIB),
        "collective-permute": (1, MIB // 2),
    }


def test_groups_are_read_in_every_way_that_they_are_written() -> None:
    program = read_program(TEXT)
    groups = {one.name: one.group for one, _ in program.run() if one.group}
    assert groups == {"whole": [0, 1, 2, 3], "g": [0, 2, 4, 6], "on": [0, 4]}


# As XLA:TPU writes a product in windows: a counter of another type, two windows an iteration.
WINDOWED = """\
HloModule jit_step, is_scheduled=true

%body (s: (bf16[8], u32[])) -> (bf16[8], u32[]) {
  %s = (bf16[8]{0}, u32[]) parameter(0)
  %n = u32[] get-tuple-element(%s), index=1
  %x = bf16[8]{0} get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%n, %two)
  %done = bf16[8]{0} negate(%x)
  ROOT %out = (bf16[8]{0}, u32[]) tuple(%done, %next)
}

%condition (s.1: (bf16[8], u32[])) -> pred[] {
  %s.1 = (bf16[8]{0}, u32[]) parameter(0)
  %eight = u32[]{:T(128)} constant(8)
  %n.1 = u32[]{:T(128)} get-tuple-element(%s.1), index=1
  ROOT %lt = pred[] compare(%n.1, %eight), direction=LT
}

ENTRY %main (p: (bf16[8], u32[])) -> (bf16[8], u32[]) {
  %p = (bf16[8]{0}, u32[]) parameter(0)
  ROOT %loop = (bf16[8]{0}, u32[]) while(%p), condition=%condition, body=%body
}
"""


def test_loops_are_counted_by_their_steps() -> None:
    program = read_program(WINDOWED)
    assert {one.name: times for one, times in program.run()}["done"] == 4


def test_time_is_cycles_and_what_communication_they_do_not_hide() -> None:
    link, clock = 45e9, 1.05e9
    gather = 2 * MIB * 3 / 4 / link  # along a row of four: one way in
    reduce = 2 * (2 * MIB * 3 / 4) / (2 * link)  # a group over both axes: two ways in
    permute = MIB / 2 / link - 10_500 / clock  # it is begun before the work that hides a part of it
    found = predict(read_program(TEXT), V4, 275e12)
    assert found.matmul == pytest.approx(5 * 1e-3)
    assert found.attention == pytest.approx(1e-5)
    assert found.exposed["ici"] == pytest.approx(5 * (gather + reduce) + permute)
    assert found.exposed["dcn"] == 0 and found.kernels == 0


# A kernel on rows of 2 heads × 512 × 128, whose queries come from the host, which takes its outcome.
ON_HOST = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (p: bf16[8,2,512,128]) -> bf16[8,2,512,128] {
  %p = bf16[8,2,512,128]{3,2,1,0:T(8,128)(2,1)S(5)} parameter(0)
  %i = s32[] constant(3)
  %in = ((bf16[8,2,512,128]{3,2,1,0:T(8,128)(2,1)S(5)}, s32[]), bf16[1,2,512,128]{3,2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) dynamic-slice-start(%p, %i), dynamic_slice_sizes={1,2,512,128}
  %q = bf16[1,2,512,128]{3,2,1,0:T(8,128)(2,1)} dynamic-slice-done(%in)
  %splash_mha_fwd.3 = (f32[512,128]{1,0}, bf16[2,512,128]{2,1,0}) custom-call(%q, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, bf16[2,512,128]{2,1,0}, bf16[2,512,128]{2,1,0}}, metadata={}
  %near = (bf16[2,512]{1,0:S(1)}, bf16[2,512]{1,0}, u32[]{:S(2)}) copy-start(%splash_mha_fwd.3)
  %nearer = bf16[2,512]{1,0:S(1)} copy-done(%near)
  %out = ((bf16[8,2,512,128]{3,2,1,0:S(5)}, bf16[1,2,512,128]{3,2,1,0}, s32[]), bf16[8,2,512,128]{3,2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%p, %splash_mha_fwd.3, %i)
  ROOT %done = bf16[8,2,512,128]{3,2,1,0:S(5)} dynamic-update-slice-done(%out)
}
"""  # noqa: E501


def test_kernels_and_host_transfers_are_modelled() -> None:
    program = read_program(ON_HOST)
    moved = 2 * 512 * 128 * 2
    assert count_host_transfers(program) == {"count": 2, "bytes": 2 * moved}
    found = predict(program, V4, 275e12)
    assert found.kernels == pytest.approx(2 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))
    assert found.exposed["host"] == found.communication["host"] == pytest.approx(2 * moved / 15e9)
    assert not found.unknown_kernels and found.exposed["ici"] == 0


def test_two_slices_reduce_over_their_hosts() -> None:
    slices = Wiring("v4", [(s, x, 0, 0) for s in range(2) for x in range(4)], (4, 1, 1), (False,) * 3)
    found = predict(read_program(TEXT), slices, 275e12)
    # The group of every second device has members in both; so does the permute. A host's 25 GB/s are for four devices.
    over_dcn = 5 * 2 * (2 * MIB * 3 / 4) + MIB / 2
    assert found.communication["dcn"] == pytest.approx(over_dcn / (25e9 / 4))


def test_a_ring_takes_from_both_sides() -> None:
    ring = Wiring("v4", [(0, x, 0, 0) for x in range(4)], (4, 1, 1), (True, False, False))
    assert (ring.ways(range(4)), ring.ways([0, 1])) == (2, 1)
    assert Collective("all-gather", 400, None, False, "", "whole").traffic(4) == 300


def test_loops_of_a_program_of_this_machine_are_counted() -> None:
    """XLA's own text: a scan of seven products on the CPU."""
    step = jax.jit(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=7)[0])
    program = read_program(step.lower(jnp.ones((64, 64))).compile().as_text())
    (loop,) = [one for one, _ in program.run() if one.opcode == "while"]
    assert program.trips(loop) == 7
    assert all(collective_of(program, one) is None for one, _ in program.run())
