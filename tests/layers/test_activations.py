"""Activation functions against numpy."""

from __future__ import annotations

import numpy as np
import pytest

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
    np.testing.assert_allclose(activation(name)(x), torch_like[name](x), **FLOAT32)
