"""Position embeddings against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.positions import LearnedPositions, SinusoidPositions
from tests.layers.arrays import random_array
from tests.tolerances import FLOAT32


def test_sinusoids_are_sines_then_cosines():
    positions, dims = np.arange(7), 10
    n = dims // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(n) / (n - 1))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    ours = SinusoidPositions(model_dims=dims).apply({}, jnp.asarray(positions)[None])
    np.testing.assert_allclose(ours[0], expected, **FLOAT32)
    with pytest.raises(ConfigError, match="model_dims=9 is odd"):
        SinusoidPositions(model_dims=9).apply({}, jnp.asarray(positions)[None])


def test_learned_positions_are_rows():
    table = random_array(9, 4)
    positions = jnp.array([[3, 0, 8]])
    ours = LearnedPositions(model_dims=4, max_seq_len=9).apply({"params": {"table": table}}, positions)
    np.testing.assert_array_equal(ours[0], table[np.array([3, 0, 8])])
    longer = LearnedPositions(model_dims=4, max_seq_len=3, num_positions=9)
    np.testing.assert_array_equal(longer.apply({"params": {"table": table}}, positions), ours)
    with pytest.raises(ConfigError, match="num_positions=2"):
        LearnedPositions(model_dims=4, max_seq_len=3, num_positions=2).init(jax.random.key(0), positions)
