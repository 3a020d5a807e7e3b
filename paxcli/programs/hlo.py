"""Compiled programs as XLA writes them out (optimized HLO text): computations, loops, collectives.

Of the text only what a cost needs is read. `docs/compile.md` says how it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8, "s4": 4, "u4": 4, "token": 0, "c64": 64, "c128": 128}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_PLACED = re.compile(_ARRAY.pattern + r"(?:\{([^}]*)\})?")
_HOST = "S(5)"  # the memory that XLA writes into a layout: `bf16[48,1024]{1,0:T(8,128)S(5)}`
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Its name, without the percent sign.
      opcode: What it does: `fusion`, `all-gather`, `while`.
      result: The type of its result, as written.
      rest: Operands and attributes, as written.
    """

    name: str
    opcode: str
    result: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest[: self.rest.find(")") + 1])

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Type and shape of each array of the result."""
        return [(kind, _numbers(dims)) for kind, dims in _ARRAY.findall(self.result)]

    @property
    def placed_bytes(self) -> list[tuple[int, bool]]:
        """Size of each array of the result, and whether it lies in the host's memory."""
        found = _PLACED.findall(self.result)
        return [(_size(kind, _numbers(dims)), _HOST in layout) for kind, dims, layout in found]

    @property
    def operand_arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Type and shape of each operand of a custom call."""
        found = _OPERANDS.search(self.rest)
        return [(kind, _numbers(dims)) for kind, dims in _ARRAY.findall(found[1])] if found else []

    @property
    def op_name(self) -> str:
        """The path of what it came from in the source: `jit(train_step)/…/attention/dot_general`."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """Clock cycles, as the TPU compiler estimates them; 0 where it says nothing."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else 0

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs; of a `while`, condition and body."""
        found = _BRANCHES.search(self.rest)
        if found:
            return re.findall(r"[\w.\-]+", found[1]) if found[1] else [found[2], found[3]]
        return _CALLED.findall(self.rest)

    @property
    def integer(self) -> int | None:
        """What a constant is, if it is one integer."""
        found = re.match(r"\((\d+)\)", self.rest) if self.opcode == "constant" else None
        return int(found[1]) if found and self.result.startswith(("s32[]", "u32[]")) else None

    @property
    def channel(self) -> str:
        """The channel of a collective, which its parts share."""
        found = _CHANNEL.search(self.rest)
        return found[1] if found else self.name

    @property
    def largest_bytes(self) -> int:
        """Size of the largest array of the result."""
        return max((_size(kind, shape) for kind, shape in self.arrays), default=0)

    @property
    def result_bytes(self) -> int:
        """Size of all arrays of the result."""
        return sum(_size(kind, shape) for kind, shape in self.arrays)

    @property
    def group(self) -> list[int] | None:
        """Devices of the first group that communicates, as places in the mesh; None for all of them."""
        for pattern, read in ((_MESH_GROUPS, _mesh_group), (_IOTA_GROUPS, _iota_group), (_LISTED_GROUPS, _listed)):
            found = pattern.search(self.rest)
            if found:
                return read(found)
        found = _PAIRS.search(self.rest)
        return [int(found[1]), int(found[2])] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      entry: Name of the computation that runs.
      computations: Name → instructions, in the order in which they run.
    """

    entry: str
    computations: dict[str, list[Instruction]]

    def trips(self, loop: Instruction) -> int:
        """How often the body of a `while` runs: as XLA says, or counting from 0 to what its condition compares with."""
        known = _TRIPS.search(loop.rest)
        if known:
            return int(known[1])
        found = {word: name for word, name in re.findall(r"(condition|body)=%?([\w.\-]+)", loop.rest)}
        condition = list(self._reached(found.get("condition", "")))
        bounds = [one.integer for one in condition if one.integer is not None]
        counters = [one for one in condition if one.opcode == "get-tuple-element"]
        step = _step(self.computations.get(found.get("body", ""), []), counters[0]) if len(counters) == 1 else 1
        return math.ceil(max(bounds, default=1) / step)

    def inner(self, instruction: Instruction, opcodes: frozenset[str]) -> Instruction | None:
        """The first instruction with one of these opcodes inside what `instruction` calls."""
        for name in instruction.called:
            for inside in self._reached(name):
                if inside.opcode in opcodes:
                    return inside
        return None

    def run(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that is scheduled, with how often it runs. Of a branch, all cases."""
        yield from self._run(self.entry, 1)

    def _run(self, name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        for instruction in self.computations.get(name, ()):
            yield instruction, times
            if instruction.opcode in ("while", "conditional", "call"):
                inner = times * self.trips(instruction) if instruction.opcode == "while" else times
                for called in instruction.called:
                    yield from self._run(called, inner)

    def _reached(self, name: str) -> Iterator[Instruction]:
        for instruction in self.computations.get(name, ()):
            yield instruction
            for called in instruction.called:
                yield from self._reached(called)


def _step(body: list[Instruction], counter: Instruction) -> int:
    """By how much a loop's body raises its counter; 1 where it does not say. XLA:TPU unrolls windowed products by 2."""
    by_name = {one.name: one for one in body}
    index = re.search(r"index=(\d+)", counter.rest)
    results = [one.operands for one in body if one.opcode == "tuple"]
    raised = by_name.get(results[-1][int(index[1])]) if index and results else None
    if raised is None or raised.opcode != "add":
        return 1
    steps = [by_name[name].integer for name in raised.operands if name in by_name]
    return next((step for step in steps if step), 1)


def read_program(text: str) -> Program:
    """Reads the text of `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = computations.setdefault(head[1], [])
                entry = head[1] if line.startswith("ENTRY") else entry
        elif line == "}":
            current = None
        else:
            found = _INSTRUCTION.match(line)
            if found:
                current.append(_instruction(found[1], line[found.end() :]))
            elif current:  # the attributes of a kernel go over several lines
                current[-1] = dataclasses.replace(current[-1], rest=f"{current[-1].rest}\n{line}")
    return Program(entry, computations)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.find(" ")
    result, rest = text[:end], text[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    return Instruction(name, opcode, result, "(" + rest)


def _closing(text: str) -> int:
    """Where the bracket that opens `text` is closed."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


@functools.cache
def _size(kind: str, shape: tuple[int, ...]) -> int:
    bits = _BITS.get(kind)
    if bits is None:
        found = re.search(r"\d+", kind)
        bits = int(found[0]) if found else 0
    return math.prod(shape) * bits // 8


def _mesh_group(found: re.Match[str]) -> list[int]:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: the devices that differ along `b` only."""
    axes = re.findall(r"'([^']+)'=(\d+)", found[1])
    sizes = [int(size) for _, size in axes]
    places = np.arange(math.prod(sizes))
    if found[2]:
        places = places.reshape(_numbers(found[2]))
        places = places.transpose(_numbers(found[3])) if found[3] else places
    wanted = re.findall(r"'([^']+)'", found[4])
    index = tuple(slice(None) if name in wanted else 0 for name, _ in axes)
    return places.reshape(sizes)[index].reshape(-1).tolist()


def _iota_group(found: re.Match[str]) -> list[int]:
    """`[2,4]<=[4,2]T(1,0)`: rows of the numbers from 0 up, reshaped, transposed, and reshaped again."""
    places = np.arange(math.prod(_numbers(found[2]))).reshape(_numbers(found[2]))
    places = places.transpose(_numbers(found[3])) if found[3] else places
    return places.reshape(_numbers(found[1]))[0].tolist()


def _listed(found: re.Match[str]) -> list[int]:
    return list(_numbers(found[1]))
