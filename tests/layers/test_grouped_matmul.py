"""Grouped matmul against a loop over groups in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.grouped_matmul import grouped_matmul, megablox_matmul
from tests.tolerances import FLOAT32

R, D, F, E = 256, 24, 40, 3


def _arrays():
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((R, D), (E, D, F), (R, F))))
    return x, w, dy


def _in_numpy(x, w, dy, sizes):
    """Outputs, and gradients of `sum(y * dy)`."""
    x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    y, dx, dw, start = np.zeros((R, F)), np.zeros_like(x), np.zeros_like(w), 0
    for group, size in enumerate(sizes[:E]):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[group] = x[rows] @ w[group], dy[rows] @ w[group].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


@pytest.mark.parametrize("sizes", [(100, 0, 156), (10, 130, 60, 56), (0, 0, 0, 256)])
@pytest.mark.parametrize(
    "matmul",
    [grouped_matmul, functools.partial(megablox_matmul, rows=128, interpret=True)],
    ids=["ragged_dot", "megablox"],
)
def test_equals_a_loop_over_groups(matmul, sizes):
    x, w, dy = _arrays()
    if sum(sizes[E:]):  # whatever these rows hold
        x, dy = x.at[-sizes[E] :].set(np.nan), dy.at[-sizes[E] :].set(np.nan)
    y, vjp = jax.vjp(lambda x, w: matmul(x, w, jnp.array(sizes, jnp.int32)), x, w)
    ours = (y, *vjp(dy))
    for mine, expected in zip(ours, _in_numpy(x, w, dy, sizes), strict=True):
        np.testing.assert_allclose(mine, expected, **FLOAT32)
