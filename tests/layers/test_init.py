"""How a small model's weights start, against the formulas."""

from __future__ import annotations

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.init import Gaussian, PraxisXavier, Xavier
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap

_D, _F, _N, _H = 48, 80, 6, 20


def _layers(init, **changes) -> dict:
    """The weights of both layers of a model, with their declared facts."""
    config = LanguageModel.config(
        vocab_size=16, max_seq_len=8, model_dims=_D, hidden_dims=_F, num_layers=2, num_heads=_N, dims_per_head=_H
    )
    config.params_init = init
    for name, value in changes.items():
        setattr(config.stack.block.attention if name == "combine_qkv" else config, name, value)
    ids = jnp.zeros((1, 4), jnp.int32)
    batch = NestedMap(ids=ids, segment_ids=ids + 1, segment_pos=ids, labels=ids, weights=jnp.ones((1, 4)))
    layers = fdl.build(config).init(jax.random.key(3), batch)["params"]["stack"]["layers"]
    boxed = {**layers["attention"], **layers["feed_forward"]}
    return {name: box for name, box in boxed.items() if not name.startswith("b_")}


def _assert_limits(weights: dict, limits: dict[str, float]) -> None:
    assert weights.keys() == limits.keys()
    for name, limit in limits.items():
        assert 0.99 * limit < np.abs(weights[name].unbox()).max() <= limit, name
        np.testing.assert_allclose(weights[name].weight.init_scale, limit, rtol=1e-6)


def test_praxis_takes_other_dimensions_for_in_and_out():
    qkv, post, matrix = np.sqrt(6 / (3 * _D * (_N + _H))), np.sqrt(6 / (_D * (_N + _H))), np.sqrt(6 / (_D + _F))
    limits = {"query": qkv, "key": qkv, "value": qkv, "post": post, "w_in": matrix, "w_out": matrix}
    _assert_limits(_layers(PraxisXavier.config()), limits)
    apart = limits | {"query": post, "key": post, "value": post}
    _assert_limits(_layers(PraxisXavier.config(), combine_qkv=False), apart)
    # With fewer key heads than query heads there is nothing to combine.
    shared = np.sqrt(6 / (_D * (2 + _H)))
    _assert_limits(_layers(PraxisXavier.config(), num_kv_heads=2), apart | {"key": shared, "value": shared})


def test_xavier_is_the_textbooks():
    heads, matrix = np.sqrt(6 / (_D + _N * _H)), np.sqrt(6 / (_D + _F))
    limits = dict.fromkeys(("query", "key", "value", "post"), heads) | {"w_in": matrix, "w_out": matrix}
    _assert_limits(_layers(Xavier.config()), limits)


@pytest.mark.parametrize(
    ("fan_in", "fan_out", "shape", "fused", "stddev"),
    [((0,), (1, 2), (2560, 20, 128), 3, 0.00133), ((0, 1), (2,), (20, 128, 2560), 1, 0.0023)],
)
def test_the_1b_model(fan_in, fan_out, shape, fused, stddev):
    w = PraxisXavier().weight(fan_in, fan_out, fused)(jax.random.key(0), shape)
    np.testing.assert_allclose(np.std(w), stddev, rtol=0.005)
    w = Xavier().weight(fan_in, fan_out, fused)(jax.random.key(0), shape)
    np.testing.assert_allclose(np.std(w), 0.0198, rtol=0.005)


def test_xavier_limits():
    w = Xavier().weight((0,), (1, 2))(jax.random.key(0), (30, 5, 8))
    limit = np.sqrt(6 / 70)
    assert limit * 0.97 < np.abs(w).max() <= limit
    w = Gaussian().weight((0,), (1,))(jax.random.key(0), (400, 100))
    np.testing.assert_allclose(np.std(w), 0.05, rtol=0.02)
    np.testing.assert_allclose(Gaussian().scale((400, 100), (0,), (1,)), 0.05)
    assert (Gaussian(0.1).table_scale(16), Gaussian(0.1, 0.2).table_scale(16), Xavier().table_scale(16)) == (
        0.1,
        0.2,
        0.25,
    )
