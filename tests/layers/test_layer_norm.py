"""LayerNorm against Flax."""

from __future__ import annotations

import flax.linen as nn
import numpy as np

from paxcli.layers.layer_norm import LayerNorm
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_layer_norm_equals_flax():
    scale, bias = random_array(8) / 9, random_array(8)
    ours = LayerNorm(dims=8).apply({"params": {"scale": scale, "bias": bias}}, random_array(2, 3, 8))
    direct = LayerNorm(dims=8, direct_scale=True)
    np.testing.assert_allclose(
        direct.apply({"params": {"scale": 1 + scale, "bias": bias}}, random_array(2, 3, 8)), ours, **FLOAT32
    )
    theirs = nn.LayerNorm(epsilon=1e-6).apply({"params": {"scale": 1 + scale, "bias": bias}}, random_array(2, 3, 8))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)
