"""Facts about a field, stated in its type: allowed range, unit, and what a change of the field affects.

    num_heads: PositiveInt
    warmup_steps: StepNumber = 0
    beta1: DecayRate = 0.9
    kernel: SafeOnResume[Kernel] = "auto"

The types are `typing.Annotated`, so the field holds a plain `int` or `float`. Every numeric field states a range;
`AnyInt` and `AnyFloat` take any finite number. A default outside the range means that a recipe must set the field.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import math
import sys
import types
import typing
from typing import Annotated, Any, NamedTuple, TypeVar

T = TypeVar("T")


_LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a field takes: all finite numbers within the given bounds.

    Attributes:
      min: Smallest.
      max: Largest.
      above: All numbers are larger than this.
      below: All numbers are smaller than this.
    """

    min: float = -math.inf
    max: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return -_LARGEST <= value <= _LARGEST and self.min <= value <= self.max and self.above < value < self.below

    def __str__(self) -> str:
        bounds = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)) or "a number"


class Unit(NamedTuple):
    """The physical unit of a number, in the plural."""

    name: str


class Mark(enum.Enum):
    """The effect of a change of a field, and of all fields below it."""

    SAFE_ON_RESUME = "may change between a stop and a resume, with `--allow-changed`"
    NOT_COMPILED = "does not affect the compiled train step"
    DERIVED = "filled in when the run starts"
    COPIED = "the path of a file that is copied into the run directory"
    COMMON = "is usually the same everywhere: its name sets all of that name, and a class that replaces one keeps it"


PositiveInt = Annotated[int, Range(min=1)]
NonNegativeInt = Annotated[int, Range(min=0)]
LayerCount = Annotated[int, Range(min=1, max=10_000)]  # each layer becomes an object, so a huge number fills the memory
ExtraLayerCount = Annotated[int, Range(min=0, max=100)]
AnyInt = Annotated[int, Range()]
TopK = Annotated[int, Range(min=1, max=2**31 - 1)]  # compared in int32
Seed = Annotated[int, Range(min=0, max=2**32 - 1)]
Steps = Annotated[int, Range(min=1, max=2**31 - 1), Unit("steps")]  # they are counted in int32
StepNumber = Annotated[int, Range(min=0, max=2**31 - 1), Unit("steps")]
Seconds = Annotated[float, Range(above=0), Unit("seconds")]
Tokens = Annotated[int, Range(min=1), Unit("tokens")]
Examples = Annotated[int, Range(min=1), Unit("examples")]
Pixels = Annotated[int, Range(min=1), Unit("pixels")]

PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(min=0)]
AnyFloat = Annotated[float, Range()]
Fraction = Annotated[float, Range(min=0, max=1)]
PositiveFraction = Annotated[float, Range(above=0, max=1)]
DecayRate = Annotated[float, Range(min=0, below=1)]
DropoutRate = Annotated[float, Range(min=0, below=1), Mark.COMMON]

SafeOnResume = Annotated[T, Mark.SAFE_ON_RESUME]
NotCompiled = Annotated[T, Mark.NOT_COMPILED]
Derived = Annotated[T, Mark.DERIVED]
Common = Annotated[T, Mark.COMMON]
TokenizerFile = Annotated[str | None, Mark.COPIED]


def marks_of(annotation: Any) -> frozenset[Mark]:
    """The marks that an annotation states: what a change of the field affects."""
    return frozenset(fact for fact in _split(annotation)[1] if isinstance(fact, Mark))


def out_of_range(path: str, value: Any, annotation: Any) -> str | None:
    """Names the first number or word in the value at `path` that its declaration excludes; None when there is none."""
    excluded: list[str] = []
    if value is None and types.NoneType in union_members(annotation):
        return None
    for member in _alternatives(annotation):
        base, facts = _split(member)
        if base in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            allowed = next((fact for fact in facts if isinstance(fact, Range)), None)
            if allowed is None or value in allowed:
                return None
            unit = next((f" ({fact.name})" for fact in facts if isinstance(fact, Unit)), "")
            null = " or null" if types.NoneType in union_members(annotation) else ""
            finite = "" if -_LARGEST <= value <= _LARGEST else "finite and "
            excluded.append(f"{path} must be {finite}{allowed}{unit}{null}, not {value}.")
        if typing.get_origin(base) is typing.Literal and isinstance(value, str | None):
            words = typing.get_args(base)
            if value in words:
                return None
            excluded.append(f"{path} must be one of {', '.join(map(str, words))}, not {value}.")
        for key, item, kind in _items(value, base):
            excluded += filter(None, [out_of_range(f"{path}.{key}", item, kind)])
    return excluded[0] if excluded else None


@functools.cache
def annotation_of(function: Any, name: str) -> Any:
    """The declared type of a field or parameter, with its facts; `typing.Any` when none is known."""
    for owner in getattr(function, "__mro__", (function,)):
        annotation = inspect.get_annotations(owner).get(name)
        if isinstance(annotation, str):
            stub = type("_", (), {"__annotations__": {name: annotation}})
            try:
                return typing.get_type_hints(stub, vars(sys.modules[owner.__module__]), include_extras=True)[name]
            except (NameError, AttributeError, TypeError, SyntaxError):
                return Any
        if annotation is not None:
            return annotation
    return Any


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without facts: `PositiveInt | None` is `(int, NoneType)`."""
    return tuple(_split(member)[0] for member in _alternatives(annotation))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, with their facts."""
    base, _ = _split(annotation)
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        return tuple(member for arg in typing.get_args(base) for member in _alternatives(arg))
    return (annotation,)


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type, and the facts that `Annotated` adds to it."""
    if typing.get_origin(annotation) is Annotated:
        base, *facts = typing.get_args(annotation)
        return base, tuple(facts)
    return annotation, ()


def _items(value: Any, kind: Any) -> list[tuple[Any, Any, Any]]:
    """The items of a list, tuple or dict of this kind: key, item and declared type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and origin is dict:
        return [(key, item, args[1]) for key, item in value.items()]
    if not isinstance(value, list | tuple) or origin not in (list, tuple):
        return []
    kinds = itertools.repeat(args[0]) if origin is list or args[-1] is Ellipsis else args
    return [(index, item, kind) for index, (item, kind) in enumerate(zip(value, kinds, strict=False))]
