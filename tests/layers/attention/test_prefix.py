"""Attention with a bidirectional prefix, against an explicit mask in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import Attention
from tests.tolerances import FLOAT32

D, N, H = 16, 2, 8
# Two packed segments, whose prefixes have 2 and 3 tokens, and padding; a segment without a prefix.
SEGMENTS = np.array([[-1, -1, 1, 1, -2, -2, -2, 2, 0, 0], [1] * 10])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 0], list(range(10))])


def test_the_prefix_is_seen_by_its_segment():
    layer = Attention(model_dims=D, num_heads=N, dims_per_head=H, bidirectional_prefix=True)
    x = jax.random.normal(jax.random.key(0), (2, 10, D))
    variables = layer.init(jax.random.key(1), x, jnp.array(SEGMENTS), jnp.array(POSITIONS))
    found, _ = layer.apply(variables, x, jnp.array(SEGMENTS), jnp.array(POSITIONS))
    query, key, value, post = (
        np.asarray(variables["params"][name].unbox()) for name in ("query", "key", "value", "post")
    )
    for row, segments in enumerate(SEGMENTS):
        for at in range(10):
            seen = [
                other
                for other in range(10)
                if abs(segments[other]) == abs(segments[at]) and (other <= at or segments[other] < 0)
            ]
            rows = np.asarray(x[row], np.float64)
            logits = np.einsum(
                "nh,snh->ns", np.einsum("d,dnh->nh", rows[at], query), np.einsum("sd,dnh->snh", rows[seen], key)
            )
            powers = np.exp(logits * H**-0.5)
            weights = powers / powers.sum(axis=1, keepdims=True)
            context = np.einsum("ns,snh->nh", weights, np.einsum("sd,dnh->snh", rows[seen], value))
            np.testing.assert_allclose(found[row, at], np.einsum("nh,nhd->d", context, post), **FLOAT32)


@pytest.mark.parametrize("fields", [{"window": 4}, {"causal": False}, {"segmented": False}], ids=str)
def test_what_a_prefix_excludes(fields):
    layer = Attention(model_dims=D, num_heads=N, dims_per_head=H, bidirectional_prefix=True, **fields)
    with pytest.raises(ConfigError, match="bidirectional_prefix=true requires"):
        layer.init(jax.random.key(0), jnp.zeros((1, 4, D)), jnp.ones((1, 4), int), jnp.ones((1, 4), int))
