"""Experts against a loop over tokens in numpy."""

from __future__ import annotations

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.block import TransformerBlock
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.stack import Stack
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.conftest import ROOT
from tests.tolerances import FLOAT32

B, T, D, F, E = 2, 10, 6, 8, 4


def _layer(**fields) -> tuple[MoeFeedForward, dict, jax.Array]:
    layer = MoeFeedForward(model_dims=D, hidden_dims=F, num_experts=E, **fields)
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    params = jax.jit(layer.init)(jax.random.key(1), x)["params"]
    return layer, jax.tree.map(lambda box: box.value, params, is_leaf=lambda leaf: hasattr(leaf, "names")), x


def _in_numpy(x, p, choices: int, capacity: int, normalize: bool):
    y = np.zeros_like(x)
    for row in range(len(x)):
        taken = np.zeros(E, int)
        for at, token in enumerate(x[row]):
            logits = token @ p["router"]
            probabilities = np.exp(logits) / np.sum(np.exp(logits))
            chosen = np.argsort(-probabilities)[:choices]
            total = probabilities[chosen].sum() if normalize else 1.0
            for expert in chosen:
                taken[expert] += 1
                if taken[expert] > capacity:
                    continue
                hidden = token @ p["w_in"][expert]
                if "w_gate" in p:
                    gate = token @ p["w_gate"][expert]
                    hidden = hidden * gate / (1 + np.exp(-gate))
                else:
                    hidden = np.maximum(hidden, 0)
                y[row, at] += probabilities[expert] / total * (hidden @ p["w_out"][expert])
    return y


@pytest.mark.parametrize(
    ("fields", "choices", "capacity", "normalize"),
    [
        ({}, 2, T, True),
        ({"gated": False, "activation": "relu", "num_experts_per_token": 1, "normalize_weights": False}, 1, T, False),
        ({"capacity_factor": 0.8}, 2, 4, True),
        ({"capacity_factor": 1.0, "num_experts_per_token": 1}, 1, 3, True),
    ],
)
def test_equals_a_loop_over_tokens(fields, choices, capacity, normalize):
    layer, params, x = _layer(**fields)
    y = jax.jit(lambda x: layer.apply({"params": params}, x))(x)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    np.testing.assert_allclose(y, _in_numpy(np.asarray(x, np.float64), p, choices, capacity, normalize), **FLOAT32)


def test_gradients_with_room_for_all_are_those_without_capacity():
    dropping, params, x = _layer(capacity_factor=E / 2)

    def gradients(layer):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(layer.apply({"params": p}, x))), (0, 1)))(params, x)

    ours, theirs = gradients(_layer()[0]), gradients(dropping)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), ours, theirs)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(ours))


def test_remat_repeats_the_matmuls_into_the_experts_and_not_the_one_out_of_them():
    layer, params, x = _layer()

    def run(params, x):
        return layer.apply({"params": params}, x)

    def num_matmuls(run):
        step = jax.grad(lambda params: jnp.sum(jnp.sin(run(params, x))))
        return str(jax.make_jaxpr(step)(params)).count("= ragged_dot")

    assert num_matmuls(jax.checkpoint(run)) == num_matmuls(run) + 2


def test_the_experts_biases_are_used_with_capacity_and_without():
    fields = {
        "use_bias": True,
        "scoring": "sigmoid",
        "num_groups": 2,
        "weights_scale": 2.0,
        "activation": "clamped_silu",
    }
    layer, params, x = _layer(**fields)
    params = {name: p + 0.1 * jax.random.normal(jax.random.key(2), p.shape) for name, p in params.items()}

    def gradients(layer):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(layer.apply({"params": p}, x)))))(params)

    ours, theirs = gradients(layer), gradients(layer.clone(capacity_factor=E / 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), ours, theirs)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(ours))


@pytest.mark.parametrize("capacity", [None, E / 2])
def test_weights_of_inputs_are_those_of_outputs_for_linear_experts(capacity):
    layer, params, x = _layer(gated=False, activation="relu", scoring="sigmoid", capacity_factor=capacity)

    def gradients(layer):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(layer.apply({"params": p}, x))), (0, 1)))(params, x)

    # A ReLU layer without biases commutes with positive factors; one with SwiGLU does not.
    found, expected = gradients(layer.clone(scale_inputs=True)), gradients(layer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), found, expected)
    layer, params, x = _layer(num_experts_per_token=1, normalize_weights=False, scoring="sigmoid", scale_inputs=True)
    weight = jnp.max(jax.nn.sigmoid(x @ params["router"]), axis=-1, keepdims=True)
    expert = jnp.argmax(x @ params["router"], axis=-1)
    gate, up = (jnp.einsum("btd,btdf->btf", weight * x, params[name][expert]) for name in ("w_gate", "w_in"))
    y = jnp.einsum("btf,btfd->btd", jax.nn.silu(gate) * up, params["w_out"][expert])
    found = jax.jit(layer.clone(capacity_factor=capacity).apply)({"params": params}, x)
    np.testing.assert_allclose(found, y, **FLOAT32)


def test_the_balance_bias_moves_choices_and_has_the_sign_of_the_excess_load():
    layer, params, x = _layer(balance_bias=True, num_experts_per_token=1)
    params = params | {"balance_bias": jnp.array([9.0, 0.0, 0.0, 0.0])}
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(layer.apply({"params": p}, x)))))(params)
    np.testing.assert_allclose(gradients["balance_bias"], np.array([1, -1, -1, -1]) * 1e-6)
    forced = jax.jit(layer.clone(num_experts=1).apply)({"params": _first_expert(params)}, x)
    np.testing.assert_allclose(jax.jit(layer.apply)({"params": params}, x), forced, **FLOAT32)


def _first_expert(params: dict) -> dict:
    return {name: p[:, :1] if name == "router" else p[:1] for name, p in params.items()}


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="num_groups=3"):
        _layer(num_groups=3)


def test_a_gate_without_shared_experts_is_refused():
    with pytest.raises(ConfigError, match="shared_gate=true has no effect without `shared_dims`"):
        _layer(shared_gate=True)


def test_a_choice_of_more_experts_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="num_experts_per_token=5"):
        _layer(num_experts_per_token=5)


def test_eight_devices_compute_what_one_computes():
    """With biases of the experts and shared experts, in a process of their own."""
    command = [sys.executable, "-m", "tests.layers.experts_on_eight_devices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_balance_bias_is_not_rounded() -> None:
    """Near 8, bfloat16 has steps of 0.06, and the biases of experts differ by less."""
    experts = functools.partial(MoeFeedForward, num_experts=4, balance_bias=True)
    model = LanguageModel(
        vocab_size=8,
        max_seq_len=4,
        model_dims=8,
        hidden_dims=8,
        num_layers=1,
        num_heads=1,
        fprop_dtype="bfloat16",
        stack=functools.partial(Stack, block=functools.partial(TransformerBlock, feed_forward=experts)),
    )
    ones = jnp.ones((1, 4), jnp.int32)
    batch = NestedMap(ids=ones, labels=ones, weights=jnp.ones((1, 4)), segment_ids=ones, segment_pos=ones)
    params = jax.eval_shape(lambda: model.cast(nn.meta.unbox(model.init(jax.random.key(0), batch)["params"])))
    of_experts = params["stack"]["layers"]["feed_forward"]
    assert of_experts["balance_bias"].dtype == jnp.float32 and of_experts["router"].dtype == jnp.bfloat16
