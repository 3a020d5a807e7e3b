"""FLOPs and memory traffic of the fusions of a compiled program."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from paxcli.programs.attribution import MATMUL_OPCODES
from paxcli.programs.hlo import Instruction, Program

_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
CUBLAS = "__cublas$"
_ALIAS = "output_to_operand_aliasing"  # of a nested fusion that only changes the layout


def matmul_flops(
    program: Program, instruction: Instruction, fp8_speed: float = 1.0, operands: Sequence[Instruction | None] = ()
) -> float:
    """FLOPs of an instruction that is a matmul, or of the matmuls that it fuses.

    Args:
      program: The program.
      instruction: The instruction.
      fp8_speed: By what the FLOPs of matmuls of two FP8 operands are divided.
      operands: Those of the instruction; without them, only what it fuses counts.
    """
    if own := _flops(instruction, operands[:2]):
        in_fp8 = all(operand and operand.arrays[0][0].startswith("f8") for operand in operands[:2])
        return own / (fp8_speed if in_fp8 else 1.0)
    inside = program.computations.get(instruction.fused, [])
    by_name = {one.name: one for one in inside}
    return sum(matmul_flops(program, one, fp8_speed, [by_name.get(name) for name in one.operands]) for one in inside)


def _flops(matmul: Instruction, operands: Sequence[Instruction | None]) -> float:
    """FLOPs of one `dot` or `convolution`, or of a call of cuBLAS; 0 for anything else."""
    is_call = matmul.call_target.startswith(CUBLAS)
    if not (is_call or matmul.opcode in MATMUL_OPCODES) or len(operands) < 2 or None in operands:
        return 0.0
    left, right = (one.arrays[0][1] for one in operands if one)
    out = matmul.arrays[0][1]
    if is_call or matmul.opcode == "dot":
        contracted = matmul.attribute(r'"?lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
        return 2.0 * math.prod(out) * math.prod(left[int(axis)] for axis in re.findall(r"\d+", contracted))
    return _convolution_flops(matmul, left, right, out)


def _convolution_flops(matmul: Instruction, left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    """FLOPs of a convolution by its shapes.

    XLA:TPU writes batched matmuls as convolutions over the batch dimensions, whose windows are mostly padding.
    """
    of_left, of_right, of_out = re.findall(r"[^_>-]+", matmul.attribute(r"dim_labels=([\w>-]+)"))
    window = dict(part.split("=") for part in matmul.attribute(r"window=\{([^}]*)\}").split())
    pairs = 1
    for number, axis in enumerate(sorted(label for label in of_left if label.isdigit())):
        facts = {name: value.split("x")[number] for name, value in window.items()}
        sizes = out[of_out.index(axis)], left[of_left.index(axis)], right[of_right.index(axis)]
        strides = tuple(int(facts.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        pairs *= _window_pairs(*sizes, *strides, int(facts.get("pad", "0_0").split("_")[0]))
    return 2.0 * pairs * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]


@functools.cache
def _window_pairs(out: int, left: int, window: int, stride: int, spread: int, step: int, pad: int) -> int:
    """Pairs of an output and a position in its window that is an element of the input, not padding."""
    positions = (o * stride - pad + w * step for o, w in itertools.product(range(out), range(window)))
    return sum(0 <= at < left * spread and at % spread == 0 for at in positions)


def hbm_bytes(program: Program, fusion: Instruction, operands: Sequence[Instruction]) -> float:
    """Bytes that a fusion reads from HBM and writes to it. Of an array that it slices, the slices count.

    Args:
      program: The program.
      fusion: The fusion.
      operands: The instructions that compute its operands, in order.
    """
    parameters = _parameters(program, fusion)
    read = sum(
        min(sum(operand.hbm_bytes), sum(_reads(program, fusion.fused, parameters[number])))
        for number, operand in enumerate(operands)
        if number in parameters
    )
    written = itertools.zip_longest(fusion.hbm_bytes, _writes(program, fusion.fused), fillvalue=math.inf)
    return read + sum(min(sizes) for sizes in written if min(sizes) < math.inf)


def _parameters(program: Program, fusion: Instruction) -> dict[int, str]:
    """The number of each operand → its name inside the fusion."""
    inside = program.computations.get(fusion.fused, [])
    return {int(one.attribute(r"^\((\d+)\)")): one.name for one in inside if one.opcode == "parameter"}


def _reads(program: Program, computation: str, name: str) -> Iterator[float]:
    """Bytes that each user of an array reads; infinite for one that reads all of it."""
    inside = program.computations.get(computation, [])
    for user in inside:
        if name not in user.operands:
            continue
        if user.opcode in _SLICES:
            yield sum(user.array_bytes)
        elif (user.opcode == "bitcast" or _ALIAS in user.rest) and user is not inside[-1]:
            yield from _reads(program, computation, user.name)
        elif user.opcode == "fusion":
            for number, inner in _parameters(program, user).items():
                if user.operands[number] == name:
                    yield from _reads(program, user.fused, inner)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            yield math.inf


def _writes(program: Program, computation: str) -> Iterator[float]:
    """Bytes that a computation writes of each result: the changed part of an array that it updates, else infinite."""
    inside = program.computations.get(computation, [])
    by_name = {one.name: one for one in inside}
    root = inside[-1] if inside else None
    for name in root.operands if root and root.opcode == "tuple" else [root.name] if root else []:
        one = by_name.get(name)
        while one is not None and one.opcode == "bitcast":
            one = by_name.get(one.operands[0])
        if one is not None and one.opcode == "dynamic-update-slice" and one.operands[1] in by_name:
            yield sum(by_name[one.operands[1]].array_bytes)
        elif one is not None and one.opcode == "fusion":
            yield from _writes(program, one.fused)
        else:
            yield math.inf
