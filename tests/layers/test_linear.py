"""A linear projection against Flax."""

from __future__ import annotations

import flax.linen as nn
import numpy as np

from paxcli.layers.linear import Linear
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_linear_equals_flax():
    w, b = random_array(4, 6), random_array(6)
    ours = Linear(input_dims=4, output_dims=6, use_bias=True).apply({"params": {"w": w, "b": b}}, random_array(2, 4))
    theirs = nn.Dense(6).apply({"params": {"kernel": w, "bias": b}}, random_array(2, 4))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)
