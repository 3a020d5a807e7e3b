"""What the instructions of a compiled program do, and for which layer: read from its HLO text."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from paxcli.programs.hlo import Instruction as Line
from paxcli.programs.hlo import read_program

Category = Literal["matmul", "attention", "norm", "collective", "other"]
CATEGORIES: tuple[Category, ...] = ("matmul", "attention", "norm", "collective", "other")

# They only contain other instructions, and take no time of their own.
CONTROL = {"while", "conditional", "call"}

_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|nccl|(send|recv)(-done)?$"
)
_PRODUCT = re.compile(r"gemm|matmul|nvjet|cutlass|\bdot\b|convolution", re.IGNORECASE)
_ATTENTION = re.compile(r"fmha|flash|splash", re.IGNORECASE)
# What JAX's transformations and control flow add to a path of scopes.
_NO_SCOPE = re.compile(
    r"jit\(.*|pjit|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint|rematted_computation|remat\d*"
    r"|custom_[jv][vj]p_call|shard_map|scan|.*->.*|.*[A-Z ,:()].*"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: What it is in HLO, such as `fusion`.
      category: What it counts as.
      layer: The path of modules and scopes that it comes from, such as `stack/layers/attention`; empty if not known.
    """

    opcode: str
    category: Category
    layer: str = ""


def read_instructions(text: str) -> dict[str, Instruction]:
    """The instructions of all computations of a module, by name."""
    computations = read_program(text).computations
    lines = [line for body in computations.values() for line in body]
    layers = {
        line.name: layer_of(line.op_name)
        or _most_common(layer_of(inner.op_name) for inner in computations.get(_fused(line), ()))
        for line in lines
    }
    whole = _whole_paths(set(layers.values()))
    return {
        line.name: Instruction(line.opcode, _category(line, layers[line.name], computations), whole[layers[line.name]])
        for line in lines
    }


def by_name(name: str) -> Instruction:
    """What the bare name of a kernel, or of an instruction without HLO text, tells."""
    category: Category = "other"
    if _COLLECTIVE.search(name.lower()):
        category = "collective"
    elif _ATTENTION.search(name):
        category = "attention"
    elif _PRODUCT.search(name):
        category = "matmul"
    return Instruction(re.sub(r"\.\d+$", "", name), category)


def fingerprint(text: str) -> str | None:
    """The mark that XLA gives a GPU program before it schedules it, by which it knows the costs of a profile."""
    found = re.search(r'fingerprint_before_lhs="?([0-9a-f]+)', text)
    return found[1] if found else None


def layer_of(op_name: str) -> str:
    """`jit(step)/jvp(Model.measured)/Model/stack/stack._run/layers/attention/mul` to `stack/layers/attention`.

    Of several operations that XLA has merged, as `jit(step)/(loss/sum:stack/norm/sum:stack/norm/sum)`, that of most.
    """
    if merged := re.fullmatch(r"(|.*?/)\((.+)\)", op_name):
        return _most_common(layer_of(merged[1] + one) for one in merged[2].split(":"))
    scopes: list[str] = []
    for part in op_name.partition(";")[0].split("/")[:-1]:  # the last is the operation
        while wrapped := re.fullmatch(r"(?!jit\()\w+\((.*)\)", part):
            part = wrapped[1]
        scope = part.partition(".")[0]  # of `layers._attended`, the method
        if scope and not _NO_SCOPE.fullmatch(part) and scopes[-1:] != [scope]:
            scopes.append(scope)
    return "/".join(scopes)


def _fused(line: Line) -> str:
    """The computation that a fusion runs; empty for others."""
    found = re.search(r" calls=%?([\w.\-]+)", line.rest)
    return found[1] if found else ""


def _target(line: Line) -> str:
    """What a custom call calls; empty for others."""
    found = re.search(r'custom_call_target="([^"]*)"', line.rest)
    return found[1] if found else ""


def _category(line: Line, layer: str, computations: dict[str, list[Line]]) -> Category:
    parts = list(_with_called(line, computations))
    last = layer.rpartition("/")[2]
    if any(_COLLECTIVE.match(part.opcode) for part in parts):
        return "collective"
    if last == "core" or any(_ATTENTION.search(_target(part)) for part in parts):
        return "attention"
    if "attention" in last and _target(line) == "tpu_custom_call":
        return "attention"
    if any(part.opcode in ("dot", "convolution") or _PRODUCT.search(_target(part)) for part in parts):
        return "matmul"
    return "norm" if last.endswith("norm") else "other"


def _with_called(line: Line, computations: dict[str, list[Line]]) -> Iterable[Line]:
    yield line
    for inner in computations.get(_fused(line), ()):
        yield from _with_called(inner, computations)


def _most_common(layers: Iterable[str]) -> str:
    found = Counter(layer for layer in layers if layer)
    return found.most_common(1)[0][0] if found else ""


def _whole_paths(layers: set[str]) -> dict[str, str]:
    """Each path, or the one that it is the end of: what JAX hoists out of a layer loses the beginning."""
    whole = {}
    for layer in layers:
        longer = [other for other in layers if layer and other.endswith(f"/{layer}")]
        whole[layer] = longer[0] if len(longer) == 1 else layer
    return whole
