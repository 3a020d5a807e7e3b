"""RMSNorm against Flax."""

from __future__ import annotations

import flax.linen as nn
import numpy as np

from paxcli.layers.rms_norm import RmsNorm
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_rms_norm_equals_flax():
    scale = random_array(8) / 9
    ours = RmsNorm(dims=8).apply({"params": {"scale": scale}}, random_array(2, 3, 8))
    theirs = nn.RMSNorm(epsilon=1e-6).apply({"params": {"scale": 1 + scale}}, random_array(2, 3, 8))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_without_a_scale_there_is_no_parameter():
    x = random_array(2, 3, 8)
    found, params = RmsNorm(dims=8, has_scale=False).init_with_output({}, x)
    theirs = nn.RMSNorm(epsilon=1e-6, use_scale=False).apply({}, x)
    assert not params
    np.testing.assert_allclose(found, theirs, **FLOAT32)
