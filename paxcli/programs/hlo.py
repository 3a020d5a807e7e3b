"""Reads the optimized HLO text of compiled programs: computations, instructions, loops, replica groups.

Only what cost models and profiles need is parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator

import numpy as np

# Opcodes that only run other computations and take no time of their own.
CONTROL_FLOW = frozenset({"while", "conditional", "call"})

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
# Name, type, opcode, and the rest. Types have no space before a word and a parenthesis.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)(\(.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_ARRAY_AND_LAYOUT = re.compile(_ARRAY.pattern + r"(?:\{([^}]*)\})?")
HOST_MEMORY = "S(5)"  # the memory space in a layout: `bf16[48,1024]{1,0:T(8,128)S(5)}`
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUP = r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: Name without the percent sign.
      opcode: HLO opcode, such as `fusion`, `all-gather` or `while`.
      result: Type of the result, as written.
      rest: Operands and attributes, as written.
    """

    name: str
    opcode: str
    result: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest[: self.rest.find(")") + 1])

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and shape of each array of the result."""
        return [(dtype, _numbers(dims)) for dtype, dims in _ARRAY.findall(self.result)]

    @property
    def result_memory(self) -> list[tuple[int, str]]:
        """Bytes of each array of the result, and its layout, with the memory space if that is not HBM."""
        found = _ARRAY_AND_LAYOUT.findall(self.result)
        return [(_num_bytes(dtype, _numbers(dims)), layout) for dtype, dims, layout in found]

    @property
    def hbm_bytes(self) -> list[int]:
        """Bytes of each array of the result; 0 for one in another memory, such as VMEM."""
        return [0 if "S(" in layout else size for size, layout in self.result_memory]

    @property
    def operand_arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and shape of each operand of a custom call."""
        operands = self.attribute(r"operand_layout_constraints=\{(.*?\})\}")
        return [(dtype, _numbers(dims)) for dtype, dims in _ARRAY.findall(operands)]

    @property
    def op_name(self) -> str:
        """Path of modules and scopes in the source: `jit(train_step)/…/attention/dot_general`; empty if unknown."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def operation(self) -> str:
        """The operation in the source, such as `dot_general`: the last part of `op_name`; if unknown, the opcode."""
        return self.op_name.rpartition("/")[2] or self.opcode

    @property
    def call_target(self) -> str:
        """Target of a custom call, such as `tpu_custom_call`; empty for other instructions."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; condition and body for a `while`."""
        branches = self.attribute(r"branch_computations=\{([^}]*)\}")
        return re.findall(r"[\w.\-]+", branches) or _CALLED.findall(self.rest)

    @property
    def fused(self) -> str:
        """Name of the computation that a fusion runs; empty for other instructions."""
        return self.attribute(r" calls=%?([\w.\-]+)")

    @property
    def integer_value(self) -> int | None:
        """Value of a constant integer scalar; None for anything else."""
        found = re.match(r"\((\d+)\)", self.rest) if self.opcode == "constant" else None
        return int(found[1]) if found and self.result.startswith(("s32[]", "u32[]")) else None

    @property
    def array_bytes(self) -> list[int]:
        """Bytes of each array of the result."""
        return [_num_bytes(dtype, shape) for dtype, shape in self.arrays]

    @property
    def replica_group(self) -> list[int] | None:
        """First group of devices that communicate, as positions in the mesh; None = all devices."""
        if found := _MESH_GROUPS.search(self.rest):
            return _mesh_group(found)
        if found := _IOTA_GROUPS.search(self.rest):
            return _permute_iota(found[2], found[3]).reshape(_numbers(found[1]))[0].tolist()
        return list(_numbers(self.attribute(_LISTED_GROUP))) or None

    def attribute(self, pattern: str) -> str:
        """The part of the attributes that the group of a pattern matches; empty if there is no match."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      entry: Name of the entry computation.
      computations: Name → instructions, in scheduled order.
    """

    entry: str
    computations: dict[str, list[Instruction]]

    def trip_count(self, loop: Instruction) -> int:
        """Iterations of a `while`: as XLA states it, else from the bound in the condition, counting up from 0.

        1 for other instructions.
        """
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
            return int(known)
        condition = list(self._reachable(loop.attribute(r"condition=%?([\w.\-]+)")))
        bounds = [one.integer_value for one in condition if one.integer_value is not None]
        counters = [one for one in condition if one.opcode == "get-tuple-element"]
        body = self.computations.get(loop.attribute(r"body=%?([\w.\-]+)"), [])
        increment = _increment(body, counters[0]) if len(counters) == 1 else 1
        return math.ceil(max(bounds, default=1) / increment)

    def find_inside(self, instruction: Instruction, opcodes: Collection[str]) -> Instruction | None:
        """First instruction with one of these opcodes in the computations that `instruction` runs."""
        inside = (one for name in instruction.called for one in self._reachable(name))
        return next((one for one in inside if one.opcode in opcodes), None)

    def with_fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, and all instructions that it fuses, nested fusions included."""
        yield instruction
        for inside in self.computations.get(instruction.fused, ()):
            yield from self.with_fused(inside)

    def scheduled_instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Every scheduled instruction with how often it runs. All branches of a conditional are included."""
        yield from self._walk_schedule(self.entry, 1)

    def _walk_schedule(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(name, ()):
            yield instruction, times
            if instruction.opcode in CONTROL_FLOW:
                for called in instruction.called:
                    yield from self._walk_schedule(called, times * self.trip_count(instruction))

    def _reachable(self, name: str) -> Iterator[Instruction]:
        for instruction in self.computations.get(name, ()):
            yield instruction
            for called in instruction.called:
                yield from self._reachable(called)


def _increment(body: list[Instruction], counter: Instruction) -> int:
    """The amount that a loop's body adds to its counter; 1 if unknown. XLA:TPU unrolls windowed einsums by 2."""
    by_name = {one.name: one for one in body}
    index = re.search(r"index=(\d+)", counter.rest)
    results = [one.operands for one in body if one.opcode == "tuple"]
    updated = by_name.get(results[-1][int(index[1])]) if index and results else None
    if updated is None or updated.opcode != "add":
        return 1
    addends = [by_name[name].integer_value for name in updated.operands if name in by_name]
    return next((addend for addend in addends if addend), 1)


def read_program(text: str) -> Program:
    """Parses the text that `compiled.as_text()` returns. Raises ValueError if its end is missing."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if head := _COMPUTATION.match(line):
                current = computations.setdefault(head[1], [])
                entry = head[1] if line.startswith("ENTRY") else entry
        elif line == "}" or line.startswith("}, execution_thread="):
            current = None
        else:
            if found := _INSTRUCTION.match(line):
                name, result, opcode, rest = found.groups()
                current.append(Instruction(name, opcode, result, rest))
            elif current:  # attributes of a kernel continue over several lines
                current[-1] = dataclasses.replace(current[-1], rest=f"{current[-1].rest}\n{line}")
    if current is not None or not entry:  # the entry computation is the last one
        raise ValueError("the text of the program ends before the end of its entry computation")
    return Program(entry, computations)


def read_fingerprint(text: str) -> str | None:
    """Fingerprint that XLA:GPU gives a module before scheduling; the costs of a PGLE profile are keyed by it."""
    found = re.search(r'fingerprint_before_lhs="?([0-9a-f]+)', text)
    return found[1] if found else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


@functools.cache
def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
    return math.prod(shape) * bits // 8


def _mesh_group(found: re.Match[str]) -> list[int]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: the devices that differ in `b` only."""
    axes = re.findall(r"'([^']+)'=(\d+)", found[1])
    sizes = [int(size) for _, size in axes]
    devices = _permute_iota(found[2] or str(math.prod(sizes)), found[3])
    wanted = re.findall(r"'([^']+)'", found[4])
    index = tuple(slice(None) if name in wanted else 0 for name, _ in axes)
    return devices.reshape(sizes)[index].reshape(-1).tolist()


def _permute_iota(shape: str, axes: str | None) -> np.ndarray:
    """An iota, reshaped and transposed: `[4,2]T(1,0)`."""
    devices = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return devices.transpose(_numbers(axes)) if axes else devices
