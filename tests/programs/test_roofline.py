"""FLOPs and memory traffic of fusions whose sizes are known by construction."""

from __future__ import annotations

import pytest

from paxcli.programs.hlo import read_program
from paxcli.programs.roofline import hbm_bytes, matmul_flops

# A layer's matrix out of a stack in another tiling, in a fusion of its own, times rows in VMEM; the product updates one
# layer of a stack.
LAYER = """\
HloModule m, is_scheduled=true

%matrix (stack: bf16[48,256,512], layer: s32[]) -> bf16[256,512] {
  %stack = bf16[48,256,512]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %one = bf16[1,256,512]{2,1,0} dynamic-slice(%stack, %layer), dynamic_slice_sizes={1,256,512}
  ROOT %flat = bf16[256,512]{1,0} bitcast(%one)
}

%tiled (stack.2: bf16[48,256,512]) -> bf16[48,256,512] {
  %stack.2 = bf16[48,256,512]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy = bf16[48,256,512]{2,1,0:T(8,128)(2,1)} copy(%stack.2)
}

%rows (a.1: bf16[1,1024,256]) -> bf16[1024,256] {
  %a.1 = bf16[1,1024,256]{2,1,0} parameter(0)
  ROOT %flat.1 = bf16[1024,256]{1,0} bitcast(%a.1)
}

%fused (a: bf16[1,1024,256], stack.1: bf16[48,256,512], layer.1: s32[], out: bf16[48,1024,512]) -> bf16[48,1024,512] {
  %a = bf16[1,1024,256]{2,1,0} parameter(0)
  %a.2 = bf16[1024,256]{1,0} fusion(%a), kind=kLoop, calls=%rows
  %stack.1 = bf16[48,256,512]{2,1,0} parameter(1)
  %layer.1 = s32[] parameter(2)
  %out = bf16[48,1024,512]{2,1,0} parameter(3)
  %retiled = bf16[48,256,512]{2,1,0} fusion(%stack.1), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiled
  %b = bf16[256,512]{1,0} fusion(%retiled, %layer.1), kind=kLoop, calls=%matrix
  %product = bf16[1024,512]{1,0} convolution(%a.2, %b), dim_labels=bf_io->bf
  %row = bf16[1,1024,512]{2,1,0} bitcast(%product)
  ROOT %updated = bf16[48,1024,512]{2,1,0} dynamic-update-slice(%out, %row, %layer.1)
}

ENTRY %main (p: bf16[1,1024,256], s: bf16[48,256,512], i: s32[], o: bf16[48,1024,512]) -> bf16[48,1024,512] {
  %p = bf16[1,1024,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %s = bf16[48,256,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[] parameter(2)
  %o = bf16[48,1024,512]{2,1,0:T(8,128)(2,1)} parameter(3)
  ROOT %layer.2 = bf16[48,1024,512]{2,1,0:T(8,128)(2,1)} fusion(%p, %s, %i, %o), kind=kOutput, calls=%fused
}
"""  # noqa: E501


def costs(text: str) -> tuple[float, float]:
    """FLOPs and HBM traffic of the fusion that a program ends with."""
    program = read_program(text)
    entry = program.computations[program.entry]
    by_name = {one.name: one for one in entry}
    operands = [by_name[name] for name in entry[-1].operands]
    return matmul_flops(program, entry[-1]), hbm_bytes(program, entry[-1], operands)


def test_a_layer_of_a_stack_is_read_and_written_alone() -> None:
    flops, traffic = costs(LAYER)
    assert flops == 2 * 1024 * 256 * 512
    assert traffic == 2 * 256 * 512 + 4 + 2 * 1024 * 512  # the rows are in VMEM
    assert costs(LAYER.replace("S(1)", ""))[1] - traffic == 2 * 1024 * 256


@pytest.mark.parametrize(
    ("left", "right", "attributes", "out", "flops"),
    [
        # Twelve heads as a batch: every output sees one head of the padded window.
        (
            "64,12,32",
            "12,32,16",
            "window={size=12 stride=11 lhs_dilate=12}, dim_labels=b0f_0io->0bf",
            "12,64,16",
            2 * 12 * 64 * 32 * 16,
        ),
        # Twelve heads of an output: the window moves over padding, and meets the input once.
        (
            "64,1,32",
            "32,12,16",
            "window={size=12 pad=11_11 rhs_reversal=1}, dim_labels=b0f_i0o->b0f",
            "64,12,16",
            2 * 64 * 32 * 12 * 16,
        ),
        ("64,32", "16,32", "lhs_contracting_dims={1}, rhs_contracting_dims={1}", "64,16", 2 * 64 * 32 * 16),
    ],
)
def test_batched_matmuls(left: str, right: str, attributes: str, out: str, flops: int) -> None:
    opcode = "dot" if "contracting" in attributes else "convolution"
    text = f"""HloModule m

%fused (a: bf16[{left}], b: bf16[{right}]) -> bf16[{out}] {{
  %a = bf16[{left}] parameter(0)
  %b = bf16[{right}] parameter(1)
  ROOT %c = bf16[{out}] {opcode}(%a, %b), {attributes}
}}

ENTRY %main (p: bf16[{left}], q: bf16[{right}]) -> bf16[{out}] {{
  %p = bf16[{left}] parameter(0)
  %q = bf16[{right}] parameter(1)
  ROOT %r = bf16[{out}] fusion(%p, %q), kind=kOutput, calls=%fused
}}
"""
    assert costs(text)[0] == flops
