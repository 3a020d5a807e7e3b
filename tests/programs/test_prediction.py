"""Predicted times of programs whose compute and communication are known by construction."""

from __future__ import annotations

import pytest

from paxcli.programs.collectives import Interconnect
from paxcli.programs.hlo import read_program
from paxcli.programs.prediction import KERNEL_RATE, predict
from tests.programs.hlo_texts import COLLECTIVES, MIB, ON_HOST, V4


def test_seconds_are_cycles_and_exposed_communication() -> None:
    link, clock = 45e9, 1.05e9
    gather = 2 * MIB * 3 / 4 / link  # in a row of four: over one link
    reduce = 2 * (2 * MIB * 3 / 4) / (2 * link)  # in a group over both axes: over two links
    permute = MIB / 2 / link - 10_500 / clock  # the fusion between its start and its done hides a part
    found = predict(read_program(COLLECTIVES), V4, 275e12)
    assert found.parts["matmul"] == pytest.approx(5 * 1e-3)
    assert found.parts["attention"] == pytest.approx(1e-5)
    assert found.parts["exposed_ici"] == pytest.approx(5 * (gather + reduce) + permute)
    assert found.parts["exposed_dcn"] == 0 and found.parts["kernels"] == 0
    assert sum(found.shares().values()) == pytest.approx(1)


def test_kernels_and_host_transfers_are_modelled() -> None:
    found = predict(read_program(ON_HOST), V4, 275e12)
    assert found.parts["kernels"] == pytest.approx(2 * 2 * 2 * 512 * 512 * 128 / (KERNEL_RATE * 275e12))
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
