"""Maps the tensors of another format to pax's parameters, and back, by rules that are data.

A `Layout` is a list of rules and the layers of both sides. A rule has the names of tensors on both sides and the steps
between them. Layers are stacked into one tensor, in tensors of their own, or in groups; `{layer}` and other fields in a
name are filled in for each layer.

    Layout((Rule("wte.weight", "embedding.table"),
            Rule("h.{layer}.mlp.c_fc.weight", "stack.{layer}.feed_forward.w_in"),
            Rule("h.{layer}.mlp.c_proj.weight", "stack.{layer}.feed_forward.w_out", (transpose(1, 0),))),
           Layers.of_stacks("{}", 12), pax_layers(names, 12))
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from paxcli.checkpoint.array_differences import ArrayDifferences, ArrayType, compare_arrays
from paxcli.convert.steps import Arrays, Step

# What tensors hold: parameters, their moving average, or Adam's first or second moments of them.
Kind = Literal["params", "ema", "mu", "nu"]

Side = Literal["foreign", "pax"]


class Source(Protocol):
    """Arrays by name: a dictionary, or a checkpoint that reads one at a time."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...


class LastKept:
    """A `Source` that reads one array at a time, and keeps the last: each may hold many layers."""

    def __init__(self, read: Callable[[str], np.ndarray]):
        self._read = functools.lru_cache(maxsize=1)(read)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Foreign tensors and the pax parameters with the same numbers: pax = steps(foreign) * scale + shift.

    Attributes:
      foreign: Name of the foreign tensor, or of several.
      pax: Name of the pax parameter, or of several.
      steps: In order, from foreign to pax.
      scale: A factor. Adam's moments scale as the gradient and its square do.
      shift: Added to parameters; moments have none.
    """

    foreign: str | tuple[str, ...]
    pax: str | tuple[str, ...]
    steps: tuple[Step, ...] = ()
    scale: float = 1.0
    shift: float = 0.0

    def names(self, side: Side) -> tuple[str, ...]:
        """The names on one side."""
        found = self.foreign if side == "foreign" else self.pax
        return (found,) if isinstance(found, str) else found

    def to_pax(self, arrays: Arrays, kind: Kind = "params") -> Arrays:
        """The pax tensors of foreign ones."""
        scale, shift = self._numbers(kind)
        for step in self.steps:
            arrays = step.to_pax(arrays)
        return arrays if (scale, shift) == (1, 0) else [x.astype(np.float32) * scale + shift for x in arrays]

    def from_pax(self, arrays: Arrays, kind: Kind = "params") -> Arrays:
        """The foreign tensors of pax ones."""
        scale, shift = self._numbers(kind)
        arrays = arrays if (scale, shift) == (1, 0) else [(x - shift) / scale for x in arrays]
        for step in reversed(self.steps):
            arrays = step.from_pax(arrays)
        return arrays

    def _numbers(self, kind: Kind) -> tuple[float, float]:
        scale = {"mu": 1 / self.scale, "nu": self.scale**-2}.get(kind, self.scale)
        return scale, 0.0 if kind in ("mu", "nu") else self.shift


def layer_rule(
    layers: str,
    foreign: str | Sequence[str],
    pax: str | Sequence[str],
    *steps: Step,
    scale: float = 1.0,
    shift: float = 0.0,
    part: Literal["layer", "dense", "sparse"] = "layer",
) -> Rule:
    """A rule for a parameter within the layers of one kind, or for several.

    Args:
      layers: The name before that of a layer on the foreign side.
      foreign: Name of the foreign tensor within a layer, or of several.
      pax: Name of the pax parameter within a layer, or of several.
      *steps: In order, from foreign to pax.
      scale: That of `Rule`.
      shift: That of `Rule`.
      part: The field that names a layer of this kind.
    """
    theirs, ours = ([names] if isinstance(names, str) else names for names in (foreign, pax))
    names = tuple(f"{layers}.{{{part}}}.{name}" for name in theirs), tuple(f"stack.{{{part}}}.{name}" for name in ours)
    return Rule(*names, steps, scale, shift)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Position of the tensors of one layer.

    Attributes:
      fields: The values in its names of `{layer}` and other fields.
      index: Its index among the layers of a stacked tensor; None = it has tensors of its own.
    """

    fields: Mapping[str, str]
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Layers:
    """All layers of one side.

    Attributes:
      slots: One for each layer, in order.
      axis: The dimension along which tensors stack layers.
      dims: Sizes of the leading dimensions, where layers are stacked along several, such as [repeats, stages].
    """

    slots: tuple[Slot, ...]
    axis: int = 0
    dims: tuple[int, ...] = ()

    @staticmethod
    def of_stacks(pattern: str, count: int, dims: tuple[int, ...] = ()) -> Layers:
        """Interleaved stacks, or one: layer i is in stack i % `count`, whose leading dimensions are `dims`.

        Without `dims`, each layer has tensors of its own. The name of a stack is `pattern` with its number.
        """
        numbers = range(count * math.prod(dims))
        slots = (Slot({"layer": pattern.format(n % count)}, n // count if dims else None) for n in numbers)
        return Layers(tuple(slots), dims=dims)

    def with_parts(self, parts: Iterable[str]) -> Layers:
        """The same layers; names of each may also have its part for `layer`, such as `{dense}`."""
        fields = [{**slot.fields, part: slot.fields["layer"]} for slot, part in zip(self.slots, parts, strict=True)]
        slots = (Slot(own, slot.index) for own, slot in zip(fields, self.slots, strict=True))
        return dataclasses.replace(self, slots=tuple(slots))

    def tensors(self, name: str) -> dict[str, list[int]]:
        """The tensors of a name -> the layers that each holds, in order."""
        found: dict[str, list[int]] = {}
        for number, slot in enumerate(self.slots):
            found.setdefault(name.format_map(slot.fields), []).append(number)
        return found

    def read(self, tensors: Source, name: str, numbers: Sequence[int]) -> np.ndarray:
        """The tensors of these layers as one, [n, …]; a view, where they are a full stack."""
        slots = [self.slots[number] for number in numbers]
        if len(slots) == 1 and slots[0].index is None:
            return tensors[name.format_map(slots[0].fields)][None]
        names = [name.format_map(slot.fields) for slot in slots]
        if slots[0].index is not None and len(set(names)) == 1:
            stack = self._layers_first(tensors[names[0]])
            indices = [slot.index or 0 for slot in slots]
            return stack if indices == list(range(len(stack))) else stack[indices]
        arrays = [(slot, tensors[name]) for slot, name in zip(slots, names, strict=True)]
        return np.stack([x if slot.index is None else self._layers_first(x)[slot.index] for slot, x in arrays])

    def arrange(self, numbers: Sequence[int], x: np.ndarray) -> np.ndarray:
        """`x` [n, …] as the tensor that holds these layers."""
        if self.slots[numbers[0]].index is None:
            return x[0]
        return np.moveaxis(x.reshape(*self.dims, *x.shape[1:]) if self.dims else x, 0, self.axis)

    def write(self, tensors: Mapping[str, np.ndarray], name: str, number: int, x: np.ndarray) -> None:
        """Copies a layer's `x` into the tensor that holds it."""
        slot = self.slots[number]
        tensor = tensors[name.format_map(slot.fields)]
        (tensor if slot.index is None else self._layers_first(tensor)[slot.index])[...] = x

    def _layers_first(self, x: np.ndarray) -> np.ndarray:
        x = np.moveaxis(x, self.axis, 0)
        return x.reshape(-1, *x.shape[len(self.dims) :]) if self.dims else x


_NO_LAYERS = Layers((Slot({}),))
_FIRST = "stack.first."


def pax_layers(params: Mapping[str, ArrayType], num_layers: int) -> Layers:
    """Pax's layers, inferred from its parameters: stacked, unrolled, interleaved, in stages, or with others before."""
    before = {f"stack.{name[len(_FIRST) :]}": x for name, x in params.items() if name.startswith(_FIRST)}
    if before:
        unrolled = {name.split(".")[1] for name in before if name.startswith("stack.layers_")}
        count = len(unrolled) or next(x.shape[0] for name, x in before.items())
        slots = pax_layers(before, count).slots
        first = (Slot({"layer": f"first.{slot.fields['layer']}"}, slot.index) for slot in slots)
        others = {name: x for name, x in params.items() if not name.startswith(_FIRST)}
        return Layers((*first, *pax_layers(others, num_layers - count).slots))
    kinds = {name.split(".")[2] for name in params if name.startswith("stack.layers.turn_")}
    if kinds:
        return Layers.of_stacks("layers.turn_{}", len(kinds), (num_layers // len(kinds),))
    if any(name.startswith("stack.layers_0.") for name in params):
        return Layers.of_stacks("layers_{}", num_layers)
    in_stages = next((name for name in params if name.startswith(("stack.stages.", "stack.repeats."))), None)
    if in_stages is None:
        return Layers.of_stacks("layers", 1, (num_layers,))
    group = in_stages[len("stack.") : in_stages.index("stages.") + len("stages.")]
    is_unrolled = f"{group}layers_" in in_stages
    dims = tuple(params[in_stages].shape[: group.count(".") + (not is_unrolled)])
    return Layers.of_stacks(f"{group}layers" + "_{}" * is_unrolled, num_layers // math.prod(dims), dims)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another format holds the parameters of a model."""

    rules: tuple[Rule, ...]
    foreign: Layers = _NO_LAYERS
    pax: Layers = _NO_LAYERS

    def only(self, names: Collection[str], side: Side = "pax") -> Layout:
        """The rules whose tensors all exist on one side: a table may list more, such as biases or other layers."""
        rules = tuple(rule for rule in self.rules if set() < self._tensors(rule, side) <= set(names))
        return dataclasses.replace(self, rules=rules)

    def without_rule(self, names: Collection[str], side: Side = "pax") -> list[str]:
        """The tensors of one side that no rule has."""
        return sorted(set(names).difference(*(self._tensors(rule, side) for rule in self.rules)))

    def layers(self, name: str, side: Side) -> Layers:
        """The layers that a name in a rule refers to."""
        fields = {field for _, field, _, _ in string.Formatter().parse(name) if field}
        if not fields:
            return _NO_LAYERS
        layers = self.foreign if side == "foreign" else self.pax
        return dataclasses.replace(layers, slots=tuple(slot for slot in layers.slots if fields <= slot.fields.keys()))

    def _tensors(self, rule: Rule, side: Side) -> set[str]:
        return {tensor for name in rule.names(side) for tensor in self.layers(name, side).tensors(name)}


def from_pax(layout: Layout, params: Source, kind: Kind = "params") -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each foreign tensor, one rule after the other, so that `params` may read from a file."""
    for rule in layout.rules:
        names = rule.names("foreign")
        layers = layout.layers(names[0], "foreign")
        for numbers in layers.tensors(names[0]).values():
            arrays = [layout.layers(name, "pax").read(params, name, numbers) for name in rule.names("pax")]
            for name, x in zip(names, rule.from_pax(arrays, kind), strict=True):
                yield name.format_map(layers.slots[numbers[0]].fields), layers.arrange(numbers, x)


def fill_pax(layout: Layout, tensors: Source, params: Mapping[str, np.ndarray], kind: Kind = "params") -> None:
    """Copies foreign tensors into the arrays of pax's parameters, one layer after the other.

    Needs no memory beyond `params` but for a tensor of one layer, and reads each tensor once, if the foreign layers
    have tensors of their own.
    """
    for rule in layout.rules:
        for number in range(len(layout.layers(rule.names("pax")[0], "pax").slots)):
            arrays = [layout.layers(name, "foreign").read(tensors, name, [number]) for name in rule.names("foreign")]
            for name, x in zip(rule.names("pax"), rule.to_pax(arrays, kind), strict=True):
                layout.layers(name, "pax").write(params, name, number, x[0])


def compare_to_model(
    layout: Layout, params: Mapping[str, ArrayType], tensors: Mapping[str, ArrayType]
) -> ArrayDifferences:
    """Names of foreign tensors that match a model, are missing, unexpected, or have another shape.

    Args:
      layout: The rules.
      params: Pax's parameters, or their shapes.
      tensors: The foreign tensors, or their shapes.
    """
    return compare_arrays(foreign_shapes(layout, params), tensors, dtypes=False)


def foreign_shapes(layout: Layout, params: Mapping[str, ArrayType]) -> dict[str, ArrayType]:
    """The shapes of a model's foreign tensors by name, in the order of `from_pax`. Their dtypes mean nothing."""
    empty = {name: np.broadcast_to(np.bool_(0), x.shape) for name, x in params.items()}  # these take no memory
    found: dict[str, ArrayType] = {}
    for rule in layout.rules:
        arrays = [layout.layers(name, "pax").read(empty, name, [0]) for name in rule.names("pax")]
        for step in reversed(rule.steps):
            arrays = step.from_pax(arrays)
        names = rule.names("foreign")
        layers = layout.layers(names[0], "foreign")
        for numbers in layers.tensors(names[0]).values():
            for name, x in zip(names, arrays, strict=True):
                stacked = np.broadcast_to(x, (len(numbers), *x.shape[1:]))
                found[name.format_map(layers.slots[numbers[0]].fields)] = layers.arrange(numbers, stacked)
    return found
