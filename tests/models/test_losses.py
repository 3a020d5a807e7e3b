from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paxcli.models.losses import cross_entropy, weighted_mean
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
