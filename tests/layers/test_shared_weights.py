"""Weights that many tokens share (rows of a table, biases, scales), and the sums of their gradients."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.attention.attention import Attention
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.linear import Linear
from paxcli.layers.lora import Lora, active_lora
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.rms_norm import RmsNorm
from paxcli.layers.shared_weights import look_up
from paxcli.mesh.sharding import set_during

_DIMS = 8
_EXPERTS: dict[str, Any] = dict(model_dims=_DIMS, hidden_dims=_DIMS, num_experts=2, use_bias=True)
_LAYERS = {
    "linear": Linear(input_dims=_DIMS, output_dims=_DIMS, use_bias=True),
    "layer norm": LayerNorm(dims=_DIMS),
    "rms norm": RmsNorm(dims=_DIMS),
    "feed-forward": FeedForward(model_dims=_DIMS, hidden_dims=_DIMS),
    "attention": Attention(model_dims=_DIMS, num_heads=2, dims_per_head=4, use_bias=True, per_dim_scale=True),
    "experts": MoeFeedForward(**_EXPERTS),
    "experts with capacity": MoeFeedForward(**_EXPERTS, capacity_factor=2.0),
    "logits": TiedEmbedding(vocab_size=_DIMS, model_dims=_DIMS, use_bias=True),
    "dora": FeedForward(model_dims=_DIMS, hidden_dims=_DIMS, use_bias=False),
}
_VECTORS = ("bias", "b", "b_in", "b_gate", "b_out", "scale", "magnitude")


@jax.jit
def gradient(table: jax.Array, ids: jax.Array, grad: jax.Array) -> jax.Array:
    return jax.vjp(lambda table: look_up(table, ids), table)[1](grad)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sums_of_gradients_are_complete(dtype: str) -> None:
    # One frequent token, as a comma: a sum in bfloat16 would end at a fifth.
    ids = np.where(np.arange(5000) % 50, 2, np.arange(5000) % 7).reshape(4, 1250)
    grad = jnp.asarray(np.random.default_rng(0).normal(1, 1, (4, 1250, 8)), dtype)
    expected = np.zeros((7, 8))
    np.add.at(expected, ids, np.asarray(grad, np.float64))
    found = gradient(jnp.zeros((7, 8), dtype), jnp.asarray(ids), grad)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-5)


def test_the_rows_are_those_of_take_and_so_is_a_gradient_in_float32() -> None:
    table, ids = jax.random.normal(jax.random.key(0), (11, 4)), jnp.array([[3, 3, 0], [10, 12, -1]])  # 12: beyond it
    grad = jax.random.normal(jax.random.key(1), (2, 3, 4))
    np.testing.assert_array_equal(look_up(table, ids), jnp.take(table, ids, axis=0))
    expected = jax.vjp(lambda table: jnp.take(table, ids, axis=0), table)[1](grad)[0]
    np.testing.assert_array_equal(gradient(table, ids, grad), expected)


@pytest.mark.parametrize("name", _LAYERS)
def test_gradients_of_biases_and_scales_in_bfloat16_are_those_in_float32(name: str) -> None:
    """All rows change them in one direction: a sum in bfloat16 would end at a part of it."""
    x = jax.random.normal(jax.random.key(0), (64, 256, _DIMS), jnp.bfloat16)
    slope = jax.random.uniform(jax.random.key(1), x.shape, jnp.bfloat16, 0.5, 1.5)
    ids = jnp.ones(x.shape[:2], jnp.int32)
    arguments = (x, ids, ids) if name == "attention" else (x,)
    method = "logits" if name == "logits" else "__call__"
    with set_during(active_lora, Lora(targets="w_in", use_dora=True) if name == "dora" else None):
        variables: Any = _LAYERS[name].init(jax.random.key(2), *arguments, method=method)
        # Values that bfloat16 has.
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), nn.meta.unbox(variables["params"]))

        @jax.jit
        @jax.grad
        def gradients(params: dict) -> jax.Array:
            dtype = jax.tree.leaves(params)[0].dtype
            y = _LAYERS[name].apply({"params": params}, x.astype(dtype), *arguments[1:], method=method)
            return jnp.sum(jax.tree.leaves(y)[0].astype(jnp.float32) * slope)

        found, expected = gradients(params), gradients(jax.tree.map(lambda p: p.astype(jnp.float32), params))
    pairs = {path: (found[path], expected[path]) for path in found if path.endswith(_VECTORS)}
    assert pairs
    for path, (one, other) in pairs.items():
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert path == "key_bias" or np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other), path  # of keys it is 0
