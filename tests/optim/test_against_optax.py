"""Optimizers that build on optax, step by step against optax's own, one tensor per variable of praxis."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.mesh.weights import Weight
from paxcli.optim.adagrad import Adagrad
from paxcli.optim.lion import Lion
from paxcli.optim.schedules import LinearRampupPolynomialDecay
from paxcli.optim.trust_ratio import Lamb, Lars
from paxcli.training.learner import Learner
from tests.tolerances import BFLOAT16

_QKV = ("key", "query", "value")
_HEADS = Weight(("embed", "heads", "head_dim"), (0,), (1, 2), group="qkv", num_stacked=1)
WEIGHTS = {
    "layers": dict.fromkeys(_QKV, _HEADS) | {"b_in": Weight(("mlp",), num_stacked=1)},
    "table": Weight(("vocab", "embed"), (0,), (1,), is_table=True),
}
LEARNER = functools.partial(
    Learner,
    learning_rate=0.1,
    schedule=LinearRampupPolynomialDecay(warmup_steps=2, decay_end=6),
    clip_gradient_norm_to_value=None,
)


def _tree(seed: int) -> dict:
    draw = np.random.default_rng(seed)
    layers = {name: draw.normal(size=(2, 6, 2, 4)) * draw.uniform(0.1, 5) for name in _QKV}
    layers["b_in"] = draw.normal(size=(2, 5))
    return jax.tree.map(jnp.float32, {"layers": layers, "table": draw.normal(size=(7, 6))})


def _variables(tree: dict) -> dict:
    """The variables of praxis: each layer by itself, with query, key and value in one."""
    layers = tree["layers"]
    qkv = {f"qkv_{i}": jnp.stack([layers[name][i] for name in _QKV]) for i in range(2)}
    return {"table": tree["table"], **qkv, **{f"bias_{i}": layers["b_in"][i] for i in range(2)}}


DECAYS = {"table": True, "qkv_0": True, "qkv_1": True, "bias_0": False, "bias_1": False}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Lion(weight_decay=0.1), functools.partial(optax.lion, weight_decay=0.1, mask=DECAYS)),
        (Lion(decay_norms_and_biases=True), optax.lion),
        (Adagrad(), functools.partial(optax.adagrad, eps=1e-10)),
        (Adagrad(0.0, 1e-3), functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-3)),
        (Lamb(), optax.lamb),
        (
            Lamb(0.8, 0.9, 1e-3, 1e-4, weight_decay=0.1, decay_norms_and_biases=False),
            functools.partial(optax.lamb, b1=0.8, b2=0.9, eps=1e-3, eps_root=1e-4, weight_decay=0.1, mask=DECAYS),
        ),
        (Lars(), optax.lars),
        (
            Lars(0.5, True, 0.1, 1e-2, weight_decay=0.1, decay_norms_and_biases=False),
            functools.partial(
                optax.lars,
                momentum=0.5,
                nesterov=True,
                trust_coefficient=0.1,
                eps=1e-2,
                weight_decay=0.1,
                weight_decay_mask=DECAYS,
            ),
        ),
    ],
)
def test_each_step_equals_optax(ours, theirs):
    learner = LEARNER(optimizer=ours)
    params = _tree(0)
    state = learner.init(params, WEIGHTS)
    update = jax.jit(functools.partial(learner.update, weights=WEIGHTS))
    expected = _variables(params)
    optimizer = theirs(learning_rate=lambda count: 0.1 * learner.schedule(count))
    their_state = optimizer.init(expected)
    their_update = jax.jit(optimizer.update)
    for number in range(5):
        grads = _tree(number + 1)
        params, state, _ = update(grads, state, params, jnp.int32(number))
        updates, their_state = their_update(_variables(grads), their_state, expected)
        expected = optax.apply_updates(expected, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), _variables(params), expected)


def test_lions_momentum_in_bfloat16():
    learner = LEARNER(optimizer=Lion(mu_dtype="bfloat16"))
    params = _tree(0)
    _, state, _ = learner.update(_tree(1), learner.init(params, WEIGHTS), params, jnp.int32(0), WEIGHTS)
    momenta = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {leaf.dtype.name for leaf in momenta} == {"bfloat16"}
    for momentum, grad in zip(momenta, jax.tree.leaves(_tree(1)), strict=True):
        np.testing.assert_allclose(momentum.astype(jnp.float32), 0.01 * grad, **BFLOAT16)


@pytest.mark.parametrize("optimizer", [Lamb(), Lars()])
def test_frozen_parameters_have_no_trust_ratio(optimizer):
    learner = LEARNER(optimizer=optimizer, bprop_variable_exclusion=("layers/key", "table"))
    params = _tree(0)
    moved, _, _ = learner.update(_tree(1), learner.init(params, WEIGHTS), params, jnp.int32(1), WEIGHTS)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, moved)
    assert same == {"layers": {"key": True, "query": False, "value": False, "b_in": False}, "table": True}
