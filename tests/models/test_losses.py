from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.models import losses
from paxcli.models.losses import cross_entropy, token_metrics, weighted_mean
from tests.tolerances import FLOAT32

LOGITS = 5 * jax.random.normal(jax.random.key(0), (3, 4, 11))
LABELS = jax.random.randint(jax.random.key(1), (3, 4), 0, 11)


def test_cross_entropy_equals_optax():
    xent, correct = cross_entropy(LOGITS, LABELS)
    np.testing.assert_allclose(xent, optax.softmax_cross_entropy_with_integer_labels(LOGITS, LABELS), **FLOAT32)
    np.testing.assert_array_equal(correct, jnp.argmax(LOGITS, axis=-1) == LABELS)


def test_its_gradient_equals_optax():
    ours = jax.grad(lambda x: jnp.sum(cross_entropy(x, LABELS)[0] ** 2))(LOGITS)
    theirs = jax.grad(lambda x: jnp.sum(optax.softmax_cross_entropy_with_integer_labels(x, LABELS) ** 2))(LOGITS)
    np.testing.assert_allclose(ours, theirs, **FLOAT32)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_it_is_the_same_on_all_platforms(platform, monkeypatch):
    """Which read the label's logit in two ways."""
    monkeypatch.setattr(losses, "current_device", lambda: types.SimpleNamespace(platform=platform))
    narrow = LOGITS.astype(jnp.bfloat16)
    for logits in (LOGITS, narrow):
        xent, correct = cross_entropy(logits, LABELS)
        expected = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), LABELS)
        np.testing.assert_allclose(xent, expected, **FLOAT32)
        np.testing.assert_array_equal(correct, jnp.argmax(logits, axis=-1) == LABELS)
    grad = jax.grad(lambda x: jnp.sum(cross_entropy(x, LABELS)[0]))(narrow)
    probs = jax.nn.softmax(narrow.astype(jnp.float32)) - jax.nn.one_hot(LABELS, 11)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad, probs.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_of_equal_logits_is_the_most_likely_token(dtype):
    """As greedy decoding chooses. In bfloat16 there are many, such as those of GPT-2, which are about -80."""
    logits = (4 * jax.random.normal(jax.random.key(2), (500, 1000)) - 80).astype(dtype)
    labels = jnp.argsort(logits, axis=-1)[:, -2]
    assert (jnp.max(logits, axis=-1) == jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]).sum() > (
        50 if dtype == "bfloat16" else -1
    )
    for one, ids in ((logits, labels), (logits, jnp.argmax(logits, axis=-1)), (jnp.zeros((3, 4)), jnp.arange(3))):
        np.testing.assert_array_equal(jax.jit(cross_entropy)(one, ids)[1], jnp.argmax(one, axis=-1) == ids)


def test_its_gradient_has_the_dtype_of_the_logits_in_64_bits_too():
    with jax.enable_x64(True):
        logits, labels = jnp.ones((2, 3), jnp.float32), jnp.zeros(2, jnp.int32)
        assert jax.grad(lambda x: cross_entropy(x, labels)[0].sum())(logits).dtype == jnp.float32


def test_small_losses_are_exact():
    logits = jnp.array([[12.0, 0.0, -3.0]])
    expected = np.log1p(np.exp(-12.0) + np.exp(-15.0))
    np.testing.assert_allclose(cross_entropy(logits, jnp.array([0]))[0], [expected], rtol=0, atol=2e-7)


def test_large_logits_stay_finite():
    xent, _ = cross_entropy(jnp.array([[1e4, 0.0, -1e4]]), jnp.array([2]))
    np.testing.assert_allclose(xent, [2e4])


@pytest.mark.parametrize("gap", [80.0, 88.0, 89.0, 1e4, 1e30])
def test_exponents_may_overflow(gap):
    logits, labels = jnp.array([[0.5 * gap, 0.0, -0.5 * gap]]), jnp.array([2])
    xent, grad = jax.value_and_grad(lambda x: cross_entropy(x, labels)[0][0])(logits)
    np.testing.assert_allclose(xent, gap, rtol=1e-6)
    np.testing.assert_allclose(grad, [[1.0, 0.0, -1.0]], rtol=1e-4, atol=1e-6)
    assert not cross_entropy(logits, labels)[1]


def test_many_logits_may_be_far_above_that_of_the_label():
    logits, labels = jnp.full((1, 1000), 100.0).at[0, 0].set(0.0), jnp.array([0])
    xent, grad = jax.value_and_grad(lambda x: cross_entropy(x, labels)[0][0])(logits)
    np.testing.assert_allclose(xent, 100 + np.log(999), rtol=1e-6)
    np.testing.assert_allclose(grad[0], [-1.0, *[1 / 999] * 999], rtol=1e-4)


def test_logits_that_are_excluded_or_not_finite():
    excluded = jnp.array([[1.0, 2.0, -jnp.inf]])
    expected = optax.softmax_cross_entropy_with_integer_labels(excluded[:, :2], jnp.array([0]))
    xent, grad = jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([0]))[0][0])(excluded)
    np.testing.assert_allclose(xent, expected[0], **FLOAT32)
    assert grad[0, 2] == 0 and jnp.isfinite(grad).all()
    for logits in (excluded, jnp.array([[jnp.nan, 0.0, 1.0]])):
        assert not jnp.isfinite(cross_entropy(logits, jnp.array([2]))[0])


def test_padding_may_have_a_label_outside_of_the_vocabulary():
    xent, _ = cross_entropy(LOGITS, LABELS - 100)
    assert jnp.isfinite(xent).all()


def test_weighted_mean():
    np.testing.assert_allclose(weighted_mean(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0])), 2.0, rtol=1e-6)
    assert weighted_mean(jnp.ones(3), jnp.zeros(3)) == 0


def test_label_smoothing_reports_both_cross_entropies():
    weights = np.asarray(jax.random.uniform(jax.random.key(2), LABELS.shape))
    log_probs = np.asarray(jax.nn.log_softmax(LOGITS), np.float64)
    target = np.where(np.arange(11) == np.asarray(LABELS)[..., None], 0.9, 0.1 / 10)
    expected = {"log_pplx_smoothed": target, "log_pplx": target > 0.5}
    metrics, _ = token_metrics(LOGITS, LABELS, jnp.asarray(weights), label_smoothing=0.1)
    for name, probs in expected.items():
        mean = np.average(-(probs * log_probs).sum(-1), weights=weights)
        np.testing.assert_allclose(metrics[name][0], mean, rtol=1e-5)
    assert metrics["loss"][0] == metrics["log_pplx_smoothed"][0]
    assert "log_pplx_smoothed" not in token_metrics(LOGITS, LABELS, jnp.asarray(weights))[0]
