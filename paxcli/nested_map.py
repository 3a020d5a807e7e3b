"""NestedMap, a dict with attribute access: `batch.ids` is `batch["ids"]`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Self

import jax
import numpy as np

from paxcli.errors import did_you_mean


class NestedMap(dict[str, Any]):
    """A dict with attribute access, registered as a JAX pytree with sorted keys. Nested dicts are not converted."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            hint = did_you_mean(name, self) or f"There are {', '.join(sorted(self)) or 'no fields'}."
            raise AttributeError(f"No field `{name}`. {hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)  # raises for an unknown one
        del self[name]

    def copy(self) -> Self:
        """A shallow copy."""
        return type(self)(self)

    def flatten_items(self) -> list[tuple[str, Any]]:
        """All leaves with their dotted paths, sorted by path."""
        leaves = jax.tree.leaves_with_path(self)
        return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _flatten_with_keys(tree: NestedMap) -> tuple[list[tuple[Hashable, Any]], tuple[str, ...]]:
    keys = tuple(sorted(tree))
    return [(jax.tree_util.DictKey(key), tree[key]) for key in keys], keys


jax.tree_util.register_pytree_with_keys(
    NestedMap, _flatten_with_keys, lambda keys, values: NestedMap(zip(keys, values, strict=True))
)


def num_rows(batch: Any) -> int:
    """The batch size of a batch or of its spec: the leading dimension of every field."""
    return jax.tree.leaves(batch)[0].shape[0]


def join_rows(sources: np.ndarray, read: Callable[[int, np.ndarray], NestedMap]) -> NestedMap:
    """A batch whose rows are of several sources.

    Args:
      sources: The number of each row's source [B].
      read: From a source and the indices of its rows in the batch to these rows.
    """
    indices = {source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()}
    parts = [read(source, index) for source, index in indices.items()]
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(list(indices.values())))
    return jax.tree.map(lambda *of_field: np.concatenate(of_field)[order], *parts)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """A hash of the contents of arrays."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]
