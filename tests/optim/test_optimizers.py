"""Optimizers and schedules against optax's own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.errors import ConfigError
from paxcli.mesh.weights import Weight
from paxcli.optim.adam import Adam
from paxcli.optim.adamw import AdamW
from paxcli.optim.sgd import Sgd
from paxcli.optim.trust_ratio import Lars
from paxcli.training.learner import Learner
from paxcli.training.validate import validate
from tests.tolerances import BFLOAT16


def _params() -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {"w_in": jax.random.normal(keys[0], (2, 3, 4)), "b_in": jax.random.normal(keys[1], (2, 4))},
        "norm": {"scale": jax.random.normal(keys[2], (4,))},
    }


WEIGHTS = {
    "layers": {"w_in": Weight(("embed", "mlp"), (0,), (1,), num_stacked=1), "b_in": Weight(("mlp",), num_stacked=1)},
    "norm": {"scale": Weight(("norm",))},
}


def _grads(number: int) -> dict:
    return jax.tree.map(lambda p: jnp.sin(p * (number + 2)), _params())


def _run(optimizer: optax.GradientTransformation, steps: int = 5) -> dict:
    params = _params()
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for number in range(steps):
        updates, state = update(_grads(number), state, params)
        params = optax.apply_updates(params, updates)
    return params


def _ours(learner: Learner, steps: int = 5) -> dict:
    params = _params()
    state = learner.init(params, WEIGHTS)
    update = jax.jit(functools.partial(learner.update, weights=WEIGHTS))
    for number in range(steps):
        params, state, _ = update(_grads(number), state, params, jnp.int32(number))
    return params


def _assert_close(ours: dict, theirs: dict) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), ours, theirs)


def test_adamw_equals_optax():
    learner = Learner(optimizer=AdamW(beta2=0.95, decay_norms_and_biases=True), learning_rate=0.01)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01, b2=0.95, weight_decay=0.1))
    _assert_close(_ours(learner), _run(theirs))


def test_first_moments_in_bfloat16():
    learner = Learner(optimizer=AdamW(decay_norms_and_biases=True, mu_dtype="bfloat16"), learning_rate=0.01)
    adamw = optax.adamw(0.01, b2=0.95, weight_decay=0.1, mu_dtype="bfloat16")
    theirs = _run(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **BFLOAT16), _ours(learner), theirs)
    assert jnp.dtype("bfloat16") in {leaf.dtype for leaf in jax.tree.leaves(learner.init(_params(), WEIGHTS))}


def test_adamw_spares_norms_and_biases():
    learner = Learner(optimizer=AdamW(weight_decay=0.5), learning_rate=0.01, clip_gradient_norm_to_value=None)
    mask = {"layers": {"w_in": True, "b_in": False}, "norm": {"scale": False}}
    _assert_close(_ours(learner), _run(optax.adamw(0.01, b2=0.95, weight_decay=0.5, mask=mask)))


def test_adam_without_clip_is_bias_corrected_adam():
    learner = Learner(
        optimizer=Adam(clip_threshold=None, weight_decay=0.0), learning_rate=0.01, clip_gradient_norm_to_value=None
    )
    _assert_close(_ours(learner), _run(optax.adam(0.01, b2=0.99, eps=1e-6)))


@pytest.mark.parametrize("lead", [(4,), (2, 2), (2, 1, 2)])
def test_adam_clips_each_layer_alone(lead):
    gradients = jnp.array([1.0, 1e-7, 1.0, 1e-7])[:, None] * jnp.ones((4, 5))
    grads = {"w": gradients.reshape(*lead, 5)}
    weights = {"w": Weight(("norm",), num_stacked=len(lead))}
    optimizer = Adam(clip_threshold=0.5, weight_decay=0.0).transformation(weights)
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    rms = jnp.sqrt(jnp.mean(jnp.square(jax.tree.leaves(updates)[0].reshape(4, 5)), axis=1))
    np.testing.assert_allclose(rms, [0.5, 1e-7 / (1e-7 + 1e-6)] * 2, rtol=1e-5)


@pytest.mark.parametrize("combined", [True, False])
def test_adam_clips_query_key_and_value_together(combined):
    """praxis holds them as one variable [3, D, N, H]; a spike in one of them limits the others in its layer."""
    shape, names = (2, 4, 2, 3), ("key", "query", "value")  # [L, D, N, H]
    grads = {name: np.random.default_rng(number).normal(size=shape) for number, name in enumerate(names)}
    spikes = {name: grad.copy() for name, grad in grads.items()}
    spikes["query"][1] *= 50  # in the second layer only
    weight = Weight(("embed", "heads", "head_dim"), (0,), (1, 2), num_stacked=1, group="qkv" if combined else None)
    optimizer = Adam(clip_threshold=0.3, weight_decay=0.0).transformation({"attention": dict.fromkeys(names, weight)})
    params = {"attention": jax.tree.map(jnp.zeros_like, grads)}
    state = optimizer.init(params)
    for tree in (grads, spikes):
        updates, state = optimizer.update({"attention": jax.tree.map(jnp.asarray, tree)}, state, params)
    first, second = (np.stack([tree[name] for name in names], axis=1) for tree in (grads, spikes))  # [L, 3, D, N, H]
    moments = [
        (b * past + present) / (1 + b) for b, past, present in ((0.9, first, second), (0.99, first**2, second**2))
    ]
    expected = moments[0] / (np.sqrt(moments[1]) + 1e-6)
    axes = (1, 2, 3, 4) if combined else (2, 3, 4)
    expected /= np.maximum(1.0, np.sqrt(np.mean(expected**2, axis=axes, keepdims=True)) / 0.3)
    ours = np.stack([updates["attention"][name] for name in names], axis=1)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_equals_optax(nesterov):
    learner = Learner(
        optimizer=Sgd(momentum=0.9, nesterov=nesterov), learning_rate=0.1, clip_gradient_norm_to_value=None
    )
    _assert_close(_ours(learner), _run(optax.sgd(0.1, momentum=0.9, nesterov=nesterov)))


def test_an_invalid_gradient_changes_nothing():
    learner, params = Learner(optimizer=AdamW()), _params()
    state = learner.init(params, WEIGHTS)
    grads = jax.tree.map(lambda g: g.at[..., 0].set(jnp.nan), _grads(0))
    new_params, new_state, report = learner.update(grads, state, params, jnp.int32(0), WEIGHTS)
    assert not report["valid"]
    jax.tree.map(np.testing.assert_array_equal, (new_params, new_state), (params, state))


@pytest.mark.parametrize(("optimizer", "momentum"), [(Sgd, None), (Sgd, 0.0), (Lars, 0.0)])
def test_nesterov_without_momentum_is_refused(optimizer, momentum):
    """It was ignored. PyTorch refuses it as well."""
    config = tiny_synthetic()
    config.task.train.learner.optimizer = optimizer.config(nesterov=True, momentum=momentum)
    with pytest.raises(ConfigError, match="`nesterov` has no effect without `momentum`"):
        validate(config)
