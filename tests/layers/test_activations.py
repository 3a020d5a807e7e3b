"""Activation functions against numpy."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers import activations
from paxcli.layers.activations import activation
from tests.tolerances import FLOAT32


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "squared_relu", "gelu_exact", "tanh", "sigmoid", "identity"])
def test_activations_by_name(name):
    torch_like = {
        "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(__import__("math").erf)(x / np.sqrt(2))),
        "relu": lambda x: np.maximum(x, 0),
        "squared_relu": lambda x: np.maximum(x, 0) ** 2,
        "silu": lambda x: x / (1 + np.exp(-x)),
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "identity": lambda x: x,
    }
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    np.testing.assert_allclose(activation(name)(jnp.asarray(x)), torch_like[name](x), **FLOAT32)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_gradient_of_gelu_is_exact_in_any_dtype(platform, monkeypatch):
    """Against autodiff of `jax.nn.gelu` in float32; in bfloat16 it is closer to it than autodiff is."""
    monkeypatch.setattr(activations, "current_device", lambda: types.SimpleNamespace(platform=platform))
    x = jnp.linspace(-12, 12, 401, dtype=jnp.bfloat16)

    def slope(function, dtype):
        return jax.grad(lambda x: function(x).astype(jnp.float32).sum())(x.astype(dtype)).astype(jnp.float32)

    gelu, expected = activation("gelu"), slope(jax.nn.gelu, jnp.float32)
    wide = x.astype(jnp.float32)
    np.testing.assert_allclose(gelu(wide), jax.nn.gelu(wide), **FLOAT32)
    np.testing.assert_allclose(slope(gelu, jnp.float32), expected, **FLOAT32)
    error, of_autodiff = (np.abs(slope(f, jnp.bfloat16) - expected).max() for f in (gelu, jax.nn.gelu))
    assert error <= 2**-8 < of_autodiff
