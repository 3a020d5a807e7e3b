"""The feed-forward layer against its formula."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from paxcli.layers.feed_forward import FeedForward
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward_against_its_formula(gated):
    params = {"w_in": random_array(4, 8), "w_out": random_array(4, 8)} | (
        {"w_gate": -random_array(4, 8)} if gated else {}
    )
    layer = FeedForward(model_dims=4, hidden_dims=8, gated=gated, activation="silu", use_bias=False)
    x = random_array(1, 2, 4)
    hidden = jax.nn.silu(x @ params["w_gate"]) * (x @ params["w_in"]) if gated else jax.nn.silu(x @ params["w_in"])
    np.testing.assert_allclose(layer.apply({"params": params}, x), hidden @ params["w_out"].T, **FLOAT32)
