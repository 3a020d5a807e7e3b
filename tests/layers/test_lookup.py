"""Lookups in a table, and the sum of their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.lookup import look_up


@jax.jit
def gradient(table: jax.Array, ids: jax.Array, grad: jax.Array) -> jax.Array:
    return jax.vjp(lambda table: look_up(table, ids), table)[1](grad)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sums_of_gradients_are_complete(dtype: str) -> None:
    # One frequent token, as a comma: a sum in bfloat16 would end at a fifth.
    ids = np.where(np.arange(5000) % 50, 2, np.arange(5000) % 7).reshape(4, 1250)
    grad = jnp.asarray(np.random.default_rng(0).normal(1, 1, (4, 1250, 8)), dtype)
    expected = np.zeros((7, 8))
    np.add.at(expected, ids, np.asarray(grad, np.float64))
    found = gradient(jnp.zeros((7, 8), dtype), jnp.asarray(ids), grad)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-5)


def test_the_rows_are_those_of_take_and_so_is_a_gradient_in_float32() -> None:
    table, ids = jax.random.normal(jax.random.key(0), (11, 4)), jnp.array([[3, 3, 0], [10, 12, -1]])  # 12: beyond it
    grad = jax.random.normal(jax.random.key(1), (2, 3, 4))
    np.testing.assert_array_equal(look_up(table, ids), jnp.take(table, ids, axis=0))
    expected = jax.vjp(lambda table: jnp.take(table, ids, axis=0), table)[1](grad)[0]
    np.testing.assert_array_equal(gradient(table, ids, grad), expected)
