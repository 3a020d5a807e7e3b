"""Facts of weights as layers declare them, and as Flax's transforms stack them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from paxcli.layers.attention.attention import Attention
from paxcli.layers.base import Layer
from paxcli.layers.init import Gaussian, Xavier
from paxcli.mesh.weights import Weight, groups_of, weights_of
from paxcli.optim.base import decay_mask

_PLACES = (jnp.ones((1, 3), jnp.int32), jnp.arange(3)[None])  # segments and positions


class Own(Layer):
    """A layer with a matrix, a scale whose name says nothing, and a table."""

    @nn.compact
    def __call__(self, x, _=None):
        w = self.weight("w", Xavier(), (4, 2, 2), ("embed", "heads", "head_dim"), contracts=(0,), produces=(1, 2))
        gamma = self.weight("gamma", nn.initializers.ones, (4,), ("norm",))
        table = self.lookup_table("table", Gaussian(), (3, 4), ("vocab", "embed"))
        return gamma * x + jnp.einsum("bd,dnh->bnh", x, w).reshape(-1, 4) + table[0], None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes, names = {"params": 0}, {nn.PARTITION_NAME: "layers"}
        return nn.scan(Own, axes, split_rngs={"params": True}, length=3, metadata_params=names)()(x, None)


def _weights(module: nn.Module) -> dict:
    return weights_of(jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 4)))["params"])


@pytest.mark.parametrize(("module", "stacked"), [(Own(), 0), (Stacked(), 1)])
def test_declared_facts_survive_a_scan(module, stacked):
    weights = _weights(module)
    weights = weights if stacked == 0 else next(iter(weights.values()))
    heads = ("embed", "heads", "head_dim")
    limit = (6 / (4 + 2 * 2)) ** 0.5
    assert weights["w"] == Weight(heads, (0,), (1, 2), num_stacked=stacked, init_scale=limit)
    table = Weight(("vocab", "embed"), (0,), (1,), is_table=True, num_stacked=stacked, init_scale=4**-0.5)
    assert weights["table"] == table
    assert decay_mask(weights) == {"w": True, "gamma": False, "table": True}


def test_the_initializer_reads_the_declaration():
    params = nn.meta.unbox(Own().init(jax.random.key(0), jnp.ones((1, 4)))["params"])
    limit = (6 / (4 + 2 * 2)) ** 0.5
    assert limit / 2 < jnp.abs(params["w"]).max() <= limit


def test_plain_flax_counts_by_shape():
    weights = _weights(nn.Dense(5))
    assert weights["kernel"] == Weight((None, None), (0,), (1,))
    assert weights["bias"] == Weight((None,))


def test_groups_are_of_one_layer():
    one = {"key": Weight(("embed",), group="qkv"), "post": Weight(("embed",)), "query": Weight(("embed",), group="qkv")}
    assert groups_of({"a": one, "b": one}) == [(0, 2), (1,), (3, 5), (4,)]
    without_key = {"a": one | {"key": optax.MaskedNode()}}  # a frozen parameter
    assert groups_of(without_key) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("changes", "weights", "biases"),
    [({}, "qkv", "qkv_bias"), ({"combine_qkv": False}, None, None), ({"num_kv_heads": 1}, None, None)],
)
def test_query_key_and_value_are_a_group(changes, weights, biases):
    attention = Attention(model_dims=4, num_heads=2, dims_per_head=2, use_bias=True, **changes)
    declared = weights_of(jax.eval_shape(attention.init, jax.random.key(0), jnp.ones((1, 3, 4)), *_PLACES)["params"])
    for name in ("query", "key", "value"):
        assert declared[name].group == weights and declared[f"{name}_bias"].group == biases
    assert declared["post"].group is None and declared["post_bias"].group is None
