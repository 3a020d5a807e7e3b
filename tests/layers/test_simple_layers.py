"""Layers with a formula, against Flax's own or the formula in numpy."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.activations import activation
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.init import Gaussian, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.linear import Linear
from paxcli.layers.output_head import OutputHead
from paxcli.layers.positions import LearnedPositions, SinusoidPositions
from paxcli.layers.rms_norm import RmsNorm
from tests.tolerances import FLOAT32


def _x(*shape: int) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(1), shape) + 1


def test_layer_norm_equals_flax():
    scale, bias = _x(8) / 9, _x(8)
    ours = LayerNorm(dims=8).apply({"params": {"scale": scale, "bias": bias}}, _x(2, 3, 8))
    theirs = nn.LayerNorm(epsilon=1e-6).apply({"params": {"scale": 1 + scale, "bias": bias}}, _x(2, 3, 8))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_rms_norm_equals_flax():
    scale = _x(8) / 9
    ours = RmsNorm(dims=8).apply({"params": {"scale": scale}}, _x(2, 3, 8))
    theirs = nn.RMSNorm(epsilon=1e-6).apply({"params": {"scale": 1 + scale}}, _x(2, 3, 8))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_linear_equals_flax():
    w, b = _x(4, 6), _x(6)
    ours = Linear(input_dims=4, output_dims=6, use_bias=True).apply({"params": {"w": w, "b": b}}, _x(2, 4))
    theirs = nn.Dense(6).apply({"params": {"kernel": w, "bias": b}}, _x(2, 4))
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward_against_its_formula(gated):
    params = {"w_in": _x(4, 8), "w_out": _x(4, 8)} | ({"w_gate": -_x(4, 8)} if gated else {})
    layer = FeedForward(model_dims=4, hidden_dims=8, gated=gated, activation="silu", use_bias=False)
    x = _x(1, 2, 4)
    hidden = jax.nn.silu(x @ params["w_gate"]) * (x @ params["w_in"]) if gated else jax.nn.silu(x @ params["w_in"])
    np.testing.assert_allclose(layer.apply({"params": params}, x), hidden @ params["w_out"].T, **FLOAT32)


def test_sinusoids_are_sines_then_cosines():
    positions, dims = np.arange(7), 10
    n = dims // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(n) / (n - 1))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    ours = SinusoidPositions(model_dims=dims).apply({}, jnp.asarray(positions)[None])
    np.testing.assert_allclose(ours[0], expected, **FLOAT32)


def test_learned_positions_are_rows():
    table = _x(9, 4)
    positions = jnp.array([[3, 0, 8]])
    ours = LearnedPositions(model_dims=4, max_seq_len=9).apply({"params": {"table": table}}, positions)
    np.testing.assert_array_equal(ours[0], table[np.array([3, 0, 8])])
    longer = LearnedPositions(model_dims=4, max_seq_len=3, num_positions=9)
    np.testing.assert_array_equal(longer.apply({"params": {"table": table}}, positions), ours)
    with pytest.raises(ConfigError, match="num_positions=2"):
        LearnedPositions(model_dims=4, max_seq_len=3, num_positions=2).init(jax.random.key(0), positions)


def test_rotary_keeps_lengths_and_sees_only_distances():
    rotary, x, y = Rotary(dims_per_head=6), _x(1, 1, 1, 6), _x(1, 1, 1, 6) ** 2
    turned = [rotary.apply({}, v, jnp.array([[p]])) for p in (2, 9) for v in (x, y)]
    np.testing.assert_allclose(jnp.linalg.norm(turned[0]), jnp.linalg.norm(x), rtol=1e-5)
    apart = [
        rotary.apply({}, x, jnp.array([[5 + s]])).ravel() @ rotary.apply({}, y, jnp.array([[s]])).ravel()
        for s in (0, 40)
    ]
    np.testing.assert_allclose(apart[0], apart[1], rtol=1e-4)
    assert not np.allclose(turned[0], turned[2])


def test_tied_embedding():
    table, bias = _x(5, 4), _x(5)
    layer = TiedEmbedding(vocab_size=5, model_dims=4, scale_sqrt_depth=True, use_bias=True, logit_cap=3.0)
    variables, ids = {"params": {"table": table, "bias": bias}}, jnp.array([[4, 0]])
    np.testing.assert_allclose(layer.apply(variables, ids, method="embed")[0], 2 * table[np.array([4, 0])], **FLOAT32)
    x = _x(1, 2, 4)
    np.testing.assert_allclose(
        layer.apply(variables, x, method="logits"), 3 * np.tanh((x @ table.T + bias) / 3), **FLOAT32
    )


def test_xavier_limits():
    w = Xavier().weight((0,), (1, 2))(jax.random.key(0), (30, 5, 8))
    limit = np.sqrt(6 / 70)
    assert limit * 0.97 < np.abs(w).max() <= limit
    w = Gaussian().weight((0,), (1,))(jax.random.key(0), (400, 100))
    np.testing.assert_allclose(np.std(w), 0.05, rtol=0.02)


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "squared_relu", "gelu_exact", "tanh", "sigmoid", "identity"])
def test_activations_by_name(name):
    torch_like = {
        "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(__import__("math").erf)(x / np.sqrt(2))),
        "relu": lambda x: np.maximum(x, 0),
        "squared_relu": lambda x: np.maximum(x, 0) ** 2,
        "silu": lambda x: x / (1 + np.exp(-x)),
        "tanh": np.tanh,
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "identity": lambda x: x,
    }
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    np.testing.assert_allclose(activation(name)(x), torch_like[name](x), **FLOAT32)


def test_logits_by_the_table_and_by_a_head():
    x, w, b = _x(2, 3, 4), _x(4, 7), _x(7)
    tied = TiedEmbedding(vocab_size=7, model_dims=4, scale_logits_sqrt_depth=True, use_bias=True, logit_cap=5.0)
    y = tied.apply({"params": {"table": w.T, "bias": b}}, x, method="logits")
    np.testing.assert_allclose(y, 5 * np.tanh((np.asarray(x) @ w / 2 + b) / 5), **FLOAT32)
    head = OutputHead(vocab_size=7, model_dims=4, use_bias=True, logit_cap=5.0)
    y = head.apply({"params": {"w": w, "b": b}}, x, method="logits")
    np.testing.assert_allclose(y, 5 * np.tanh((np.asarray(x) @ w + b) / 5), **FLOAT32)
