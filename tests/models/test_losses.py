from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

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


def test_large_logits_stay_finite():
    xent, _ = cross_entropy(jnp.array([[1e4, 0.0, -1e4]]), jnp.array([2]))
    np.testing.assert_allclose(xent, [2e4])


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
