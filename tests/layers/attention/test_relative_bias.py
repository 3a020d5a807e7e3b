"""T5's bias for distances, as HF `transformers` computes it (tests/data/hf_families.py)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.relative_bias import RelativeBias
from tests.models.hf_families import arrays_of
from tests.tolerances import FLOAT32


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_attention_is_that_of_t5(kind):
    arrays = arrays_of(f"t5/{kind}")
    w = {name: jnp.asarray(arrays[f"param/{name}.weight"]).T for name in "qkvo"}
    params = {name: w[x].reshape(32, 4, 8) for name, x in {"query": "q", "key": "k", "value": "v"}.items()}
    params["post"] = w["o"].reshape(4, 8, 32)
    params["relative_bias"] = {"table": jnp.asarray(arrays["param/relative_attention_bias.weight"])}
    bias = functools.partial(RelativeBias, num_buckets=8, max_distance=12)
    layer = Attention(
        model_dims=32, num_heads=4, dims_per_head=8, query_scale=1.0, causal=kind == "decoder", relative_bias=bias
    )
    x = jnp.asarray(arrays["in/x"])
    ones = jnp.ones(x.shape[:2], jnp.int32)
    y, _ = layer.apply({"params": params}, x, ones, ones.cumsum(1) - 1)
    np.testing.assert_allclose(y, arrays["out/y"], **FLOAT32)


@pytest.mark.parametrize("fields", [{"max_distance": 16}, {"num_buckets": 3, "bidirectional": True}], ids=str)
def test_buckets_without_distances_are_refused(fields):
    with pytest.raises(ConfigError, match="max_distance="):
        RelativeBias(num_heads=2, **fields).init(jax.random.key(0), jnp.zeros((2, 2), jnp.int32))
