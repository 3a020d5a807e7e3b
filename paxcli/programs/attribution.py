"""Attributes the instructions of a compiled program to kinds of work and to layers."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from paxcli.layers.scopes import ATTENTION, ATTENTION_CORE, ATTENTION_PROJECTION, NORM_SUFFIX
from paxcli.programs.hlo import CONTROL_FLOW, Instruction, Program

Category = Literal["matmul", "attention", "norm", "collective", "other", "control"]
# `control` is left out: such instructions only run others and take no time of their own.
CATEGORIES: tuple[Category, ...] = ("matmul", "attention", "norm", "collective", "other")

PALLAS_TARGET = "tpu_custom_call"
REMATTED = "rematted_computation"  # in the path of scopes of what remat repeats

MATMUL_OPCODES = frozenset({"dot", "convolution"})
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|nccl|(send|recv)(-done)?$"
)
_MATMUL_KERNEL = re.compile(r"gemm|matmul|nvjet|cublas|cutlass|\bdot\b|convolution", re.IGNORECASE)
_ATTENTION_KERNEL = re.compile(r"fmha|flash|splash|cudnn::fusion", re.IGNORECASE)
# What JAX's transformations and control flow add to a path of scopes.
_NOT_A_SCOPE = re.compile(
    r"jit\(.*|pjit|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint|rematted_computation|remat\d*"
    r"|custom_[jv][vj]p_call|shard_map|scan|.*->.*|.*[A-Z ,:()].*"
)


class Attribution(NamedTuple):
    """Category and layer of an instruction.

    Attributes:
      category: Kind of work.
      layer: Path of modules and scopes that it comes from, such as `stack/layers/attention`; empty if unknown.
    """

    category: Category
    layer: str = ""


def attribute_instructions(program: Program) -> dict[str, Attribution]:
    """Attributes the instructions of all computations, by name."""
    instructions = [one for computation in program.computations.values() for one in computation]
    layers = {
        one.name: layer_of(one.op_name)
        or _most_common(layer_of(inside.op_name) for inside in program.computations.get(one.fused, ()))
        for one in instructions
    }
    full_paths = _complete_paths(set(layers.values()))
    return {
        one.name: Attribution(_category(program, one, layers[one.name]), full_paths[layers[one.name]])
        for one in instructions
    }


def attribute_name(name: str) -> Attribution:
    """Attributes a kernel, or an instruction whose HLO is not known, by its bare name."""
    if re.sub(r"\.\d+$", "", name) in CONTROL_FLOW:
        return Attribution("control")
    if _COLLECTIVE.search(name.lower()):
        return Attribution("collective")
    if _ATTENTION_KERNEL.search(name):
        return Attribution("attention")
    return Attribution("matmul" if _MATMUL_KERNEL.search(name) else "other")


def is_attention(op_name: str) -> bool:
    """Whether an operation belongs to an attention layer, but to none of its projections."""
    scopes = layer_of(op_name).split("/")
    return ATTENTION in scopes and ATTENTION_PROJECTION not in scopes


@functools.cache
def layer_of(op_name: str) -> str:
    """`jit(step)/jvp(Model.measured)/Model/stack/stack._run/layers/attention/mul` to `stack/layers/attention`.

    For operations that XLA merged, such as `jit(step)/(loss/sum:stack/norm/sum:stack/norm/sum)`, the most common one.
    """
    if merged := re.fullmatch(r"(|.*?/)\((.+)\)", op_name):
        return _most_common(layer_of(merged[1] + one) for one in merged[2].split(":"))
    scopes: list[str] = []
    for part in op_name.partition(";")[0].split("/")[:-1]:  # the last part is the operation
        while wrapped := re.fullmatch(r"(?!jit\()\w+\((.*)\)", part):
            part = wrapped[1]
        scope = part.partition(".")[0]  # Flax writes methods as `layers._attended`
        if scope and not _NOT_A_SCOPE.fullmatch(part) and scopes[-1:] != [scope]:
            scopes.append(scope)
    return "/".join(scopes)


def _category(program: Program, instruction: Instruction, layer: str) -> Category:
    if instruction.opcode in CONTROL_FLOW:
        return "control"
    parts = list(program.with_fused(instruction))
    scope = layer.rpartition("/")[2]
    # A call on SparseCores has the name of what it calls.
    if any(_COLLECTIVE.match(part.name if part.opcode.startswith("call-") else part.opcode) for part in parts):
        return "collective"
    if scope == ATTENTION_CORE or any(_ATTENTION_KERNEL.search(part.call_target) for part in parts):
        return "attention"
    if ATTENTION in scope and instruction.call_target == PALLAS_TARGET:
        return "attention"
    if any(part.opcode in MATMUL_OPCODES or _MATMUL_KERNEL.search(part.call_target) for part in parts):
        return "matmul"
    return "norm" if scope.endswith(NORM_SUFFIX) else "other"


def _most_common(layers: Iterable[str]) -> str:
    found = Counter(layer for layer in layers if layer)
    return found.most_common(1)[0][0] if found else ""


def _complete_paths(layers: set[str]) -> dict[str, str]:
    """Completes paths that lost their beginning, as those of operations that JAX hoists out of a layer do.

    A path is completed to the only other one that ends in it; any other path maps to itself.
    """
    complete = {}
    for layer in layers:
        longer = [other for other in layers if layer and other.endswith(f"/{layer}")]
        complete[layer] = longer[0] if len(longer) == 1 else layer
    return complete
