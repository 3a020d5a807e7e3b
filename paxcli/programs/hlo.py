"""Reads the optimized HLO text of compiled programs: computations, instructions, loops, replica groups.

Only what cost models and profiles need is parsed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

# Opcodes that only run other computations and take no time of their own.
CONTROL_FLOW = frozenset({"while", "conditional", "call"})

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "s4": 4, "u4": 4, "token": 0, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_ARRAY_AND_LAYOUT = re.compile(_ARRAY.pattern + r"(?:\{([^}]*)\})?")
_HOST_MEMORY = "S(5)"  # the memory space in a layout: `bf16[48,1024]{1,0:T(8,128)S(5)}`
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_FUSED = re.compile(r" calls=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_FINGERPRINT = re.compile(r'fingerprint_before_lhs="?([0-9a-f]+)')


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
    def result_memory(self) -> list[tuple[int, bool]]:
        """Bytes of each array of the result, and whether it is in host memory."""
        found = _ARRAY_AND_LAYOUT.findall(self.result)
        return [(_num_bytes(dtype, _numbers(dims)), _HOST_MEMORY in layout) for dtype, dims, layout in found]

    @property
    def operand_arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Element type and shape of each operand of a custom call."""
        found = _OPERANDS.search(self.rest)
        return [(dtype, _numbers(dims)) for dtype, dims in _ARRAY.findall(found[1])] if found else []

    @property
    def op_name(self) -> str:
        """Path of modules and scopes in the source: `jit(train_step)/…/attention/dot_general`; empty if unknown."""
        return self._attribute(_OP_NAME)

    @property
    def call_target(self) -> str:
        """Target of a custom call, such as `tpu_custom_call`; empty for other instructions."""
        return self._attribute(_CALL_TARGET)

    @property
    def estimated_cycles(self) -> int:
        """Clock cycles estimated by the TPU compiler; 0 if it gives no estimate."""
        return int(self._attribute(_CYCLES) or 0)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; condition and body for a `while`."""
        found = _BRANCHES.search(self.rest)
        if found:
            return re.findall(r"[\w.\-]+", found[1]) if found[1] else [found[2], found[3]]
        return _CALLED.findall(self.rest)

    @property
    def fused(self) -> str:
        """Name of the computation that a fusion runs; empty for other instructions."""
        return self._attribute(_FUSED)

    @property
    def integer_value(self) -> int | None:
        """Value of a constant integer scalar; None for anything else."""
        found = re.match(r"\((\d+)\)", self.rest) if self.opcode == "constant" else None
        return int(found[1]) if found and self.result.startswith(("s32[]", "u32[]")) else None

    @property
    def channel(self) -> str:
        """Channel of a collective, which its start and done share; the instruction's name if it has none."""
        return self._attribute(_CHANNEL) or self.name

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest array of the result."""
        return max((_num_bytes(dtype, shape) for dtype, shape in self.arrays), default=0)

    @property
    def result_bytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(_num_bytes(dtype, shape) for dtype, shape in self.arrays)

    @property
    def replica_group(self) -> list[int] | None:
        """First group of devices that communicate, as positions in the mesh; None = all devices."""
        for pattern, read in ((_MESH_GROUPS, _mesh_group), (_IOTA_GROUPS, _iota_group), (_LISTED_GROUPS, _number_list)):
            found = pattern.search(self.rest)
            if found:
                return read(found)
        found = _PAIRS.search(self.rest)
        return [int(found[1]), int(found[2])] if found else None

    def _attribute(self, pattern: re.Pattern[str]) -> str:
        found = pattern.search(self.rest)
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
        """Iterations of a `while`: as XLA states it, else from the bound in the condition, counting up from 0."""
        known = _TRIP_COUNT.search(loop.rest)
        if known:
            return int(known[1])
        found = {word: name for word, name in re.findall(r"(condition|body)=%?([\w.\-]+)", loop.rest)}
        condition = list(self._reachable(found.get("condition", "")))
        bounds = [one.integer_value for one in condition if one.integer_value is not None]
        counters = [one for one in condition if one.opcode == "get-tuple-element"]
        body = self.computations.get(found.get("body", ""), [])
        increment = _increment(body, counters[0]) if len(counters) == 1 else 1
        return math.ceil(max(bounds, default=1) / increment)

    def find_inside(self, instruction: Instruction, opcodes: frozenset[str]) -> Instruction | None:
        """First instruction with one of these opcodes in the computations that `instruction` runs."""
        for name in instruction.called:
            for inside in self._reachable(name):
                if inside.opcode in opcodes:
                    return inside
        return None

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
                inner = times * self.trip_count(instruction) if instruction.opcode == "while" else times
                for called in instruction.called:
                    yield from self._walk_schedule(called, inner)

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
    """Parses the text that `compiled.as_text()` returns."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head[1], [])
                entry = head[1] if line.startswith("ENTRY") else entry
        elif line == "}":
            current = None
        else:
            found = _INSTRUCTION.match(line)
            if found:
                current.append(_parse_instruction(found[1], line[found.end() :]))
            elif current:  # attributes of a kernel continue over several lines
                current[-1] = dataclasses.replace(current[-1], rest=f"{current[-1].rest}\n{line}")
    return Program(entry, computations)


def read_fingerprint(text: str) -> str | None:
    """Fingerprint that XLA:GPU gives a module before scheduling; the costs of a PGLE profile are keyed by it."""
    found = _FINGERPRINT.search(text)
    return found[1] if found else None


def _parse_instruction(name: str, text: str) -> Instruction:
    end = _closing_bracket(text) if text.startswith("(") else text.find(" ")
    result, rest = text[:end], text[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    return Instruction(name, opcode, result, "(" + rest)


def _closing_bracket(text: str) -> int:
    """Position after the bracket that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


@functools.cache
def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = _BITS.get(dtype)
    if bits is None:
        found = re.search(r"\d+", dtype)
        bits = int(found[0]) if found else 0
    return math.prod(shape) * bits // 8


def _mesh_group(found: re.Match[str]) -> list[int]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: the devices that differ in `b` only."""
    axes = re.findall(r"'([^']+)'=(\d+)", found[1])
    sizes = [int(size) for _, size in axes]
    devices = np.arange(math.prod(sizes))
    if found[2]:
        devices = devices.reshape(_numbers(found[2]))
        devices = devices.transpose(_numbers(found[3])) if found[3] else devices
    wanted = re.findall(r"'([^']+)'", found[4])
    index = tuple(slice(None) if name in wanted else 0 for name, _ in axes)
    return devices.reshape(sizes)[index].reshape(-1).tolist()


def _iota_group(found: re.Match[str]) -> list[int]:
    """`[2,4]<=[4,2]T(1,0)`: rows of an iota that is reshaped, transposed and reshaped again."""
    devices = np.arange(math.prod(_numbers(found[2]))).reshape(_numbers(found[2]))
    devices = devices.transpose(_numbers(found[3])) if found[3] else devices
    return devices.reshape(_numbers(found[1]))[0].tolist()


def _number_list(found: re.Match[str]) -> list[int]:
    return list(_numbers(found[1]))
