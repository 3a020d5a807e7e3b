"""Steps between the tensors of another format and pax's: reorder dimensions, split and merge them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step from the foreign tensors of a rule to pax's, and its inverse. Tensors are [n, …] for n layers."""

    to_pax: Callable[[Arrays], Arrays]
    from_pax: Callable[[Arrays], Arrays]

    @property
    def inverse(self) -> Step:
        """The step in the other direction."""
        return Step(self.from_pax, self.to_pax)


def transpose(*order: int) -> Step:
    """Permutes dimensions: dimension i of pax's tensor is dimension `order[i]` of the foreign one, within a layer."""

    def permute(order: Sequence[int]) -> Callable[[Arrays], Arrays]:
        return lambda arrays: [x.transpose(0, *(axis + 1 for axis in order)) for x in arrays]

    return Step(permute(order), permute([int(axis) for axis in np.argsort(order)]))


def reshape(foreign: Sequence[int], pax: Sequence[int]) -> Step:
    """Splits and merges dimensions: the shapes of a layer's tensor on both sides."""

    def to(shape: Sequence[int]) -> Callable[[Arrays], Arrays]:
        return lambda arrays: [x.reshape(len(x), *shape) for x in arrays]

    return Step(to(pax), to(foreign))


def unstack(axis: int) -> Step:
    """One tensor to several, along a dimension that they lose. Its inverse stacks them."""
    axis = _with_layers(axis)
    return Step(lambda arrays: list(np.moveaxis(arrays[0], axis, 0)), lambda arrays: [np.stack(arrays, axis)])


def split(axis: int, *sizes: int) -> Step:
    """One tensor to several, along a dimension of these sizes; none = two halves. Its inverse concatenates them."""
    axis, ends = _with_layers(axis), list(itertools.accumulate(sizes))[:-1] or 2
    return Step(lambda arrays: np.split(arrays[0], ends, axis), lambda arrays: [np.concatenate(arrays, axis)])


def _with_layers(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


def deinterleave(*which: int) -> Step:
    """Reorders the last dimension from RoPE's adjacent pairs (2i, 2i + 1) to pairs (i, i + R/2).

    Args:
      which: Indices of the tensors that this applies to; none = all.
    """

    def over(apart: Step, together: Step) -> Callable[[Arrays], Arrays]:
        def reorder(x: np.ndarray) -> np.ndarray:
            return together.from_pax(apart.to_pax([x]))[0]

        return lambda arrays: [reorder(x) if i in which or not which else x for i, x in enumerate(arrays)]

    return Step(over(alternate(), split(-1)), over(split(-1), alternate()))


def alternate() -> Step:
    """One tensor to two, whose entries alternate along its last dimension."""
    return Step(
        lambda arrays: [arrays[0][..., ::2], arrays[0][..., 1::2]],
        lambda arrays: [np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)],
    )
