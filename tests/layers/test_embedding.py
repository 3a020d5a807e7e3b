"""The tied embedding against its formula."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from paxcli.layers.embedding import TiedEmbedding
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_tied_embedding():
    table, bias = random_array(5, 4), random_array(5)
    layer = TiedEmbedding(vocab_size=5, model_dims=4, scale_sqrt_depth=True, use_bias=True, logit_cap=3.0)
    variables, ids = {"params": {"table": table, "bias": bias}}, jnp.array([[4, 0]])
    np.testing.assert_allclose(layer.apply(variables, ids, method="embed")[0], 2 * table[np.array([4, 0])], **FLOAT32)
    x = random_array(1, 2, 4)
    np.testing.assert_allclose(
        layer.apply(variables, x, method="logits"), 3 * np.tanh((x @ table.T + bias) / 3), **FLOAT32
    )
