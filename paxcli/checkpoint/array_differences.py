"""Compares the names, shapes and dtypes of two sets of arrays, such as a checkpoint's and a model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp

from paxcli.checkpoint.reading import listing


class ArrayType(Protocol):
    """Anything with a shape and a dtype: an array, its abstract value, or its entry in a manifest."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


Arrays = Mapping[str, ArrayType]


@dataclasses.dataclass(frozen=True)
class ArrayDifferences:
    """How the arrays that were found differ from those that were expected, by name.

    Attributes:
      matched: Found as expected.
      missing: Expected, not found.
      unexpected: Found, not expected.
      mismatched: Found with another shape or dtype -> both, spelled out.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.missing or self.unexpected or self.mismatched)

    def text(self) -> str:
        """One line: the first few of each kind that is not empty."""
        shown, left_out = list(self.mismatched.values())[:5], len(self.mismatched) - 5
        more = [f"and {left_out} more"] if left_out > 0 else []
        lists = {"it lacks": self.missing, "only it has": self.unexpected}
        return "; ".join([*shown, *more, *[f"{verb} {listing(names)}" for verb, names in lists.items() if names]])


def compare_arrays(expected: Arrays, found: Arrays, dtypes: bool = True, casts: bool = False) -> ArrayDifferences:
    """Compares arrays by name.

    Args:
      expected: Those of the model.
      found: Those of the checkpoint.
      dtypes: Whether dtypes have to be equal as well.
      casts: Whether floats of two dtypes match all the same.
    """
    mismatched = {}
    for name, array in expected.items():
        if name in found and (there := _spell(found[name], dtypes, casts)) != (here := _spell(array, dtypes, casts)):
            mismatched[name] = f"`{name}` is {there} there, {here} here"
    return ArrayDifferences(
        matched=[name for name in expected if name in found and name not in mismatched],
        missing=[name for name in expected if name not in found],
        unexpected=[name for name in found if name not in expected],
        mismatched=mismatched,
    )


def _spell(array: ArrayType, dtypes: bool, casts: bool) -> str:
    is_float = casts and jnp.issubdtype(jnp.dtype(array.dtype), jnp.floating)
    return f"{'float' if is_float else array.dtype if dtypes else ''}{list(array.shape)}"
