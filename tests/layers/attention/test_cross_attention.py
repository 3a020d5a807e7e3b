"""Cross-attention: fields that it shares with self-attention take effect, or are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from paxcli.errors import ConfigError
from paxcli.layers.attention.cross_attention import CrossAttention
from tests.tolerances import FLOAT32

X, SOURCE = jax.random.normal(jax.random.key(0), (2, 3, 8)), jax.random.normal(jax.random.key(1), (2, 5, 8))
SEGMENTS = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 5), jnp.int32)
SIZES = {"model_dims": 8, "num_heads": 2, "dims_per_head": 4}


def test_sinks_are_logits_of_a_key_without_value() -> None:
    """They were parameters that nothing read."""
    layer = CrossAttention(**SIZES, sinks=True)
    params = meta.unbox(layer.init(jax.random.key(2), X, SEGMENTS[0], SOURCE, SEGMENTS[1])["params"])
    params["sinks"] = jnp.array([0.5, 2.0])
    found, _ = layer.apply({"params": params}, X, SEGMENTS[0], SOURCE, SEGMENTS[1])
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    queries, keys, values = (
        np.einsum("btd,dnh->bnth", x, p[name]) for x, name in ((X, "query"), (SOURCE, "key"), (SOURCE, "value"))
    )
    weights = np.exp(np.einsum("bnth,bnsh->bnts", queries, keys) / 2)
    shares = weights / (weights.sum(-1, keepdims=True) + np.exp(p["sinks"])[None, :, None, None])
    expected = np.einsum("bnts,bnsh,nhd->btd", shares, values, p["post"])
    np.testing.assert_allclose(found, expected, **FLOAT32)


def test_a_temperature_that_grows_with_the_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="no order of positions"):
        CrossAttention(**SIZES, temperature_growth=0.1).init(jax.random.key(2), X, SEGMENTS[0], SOURCE, SEGMENTS[1])
