"""The distribution of sampled tokens, against the definitions of Pax and of Hugging Face in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from paxcli.models.sampling import Sampling, choose

LOGITS = np.log(np.array([0.02, 0.33, 0.05, 0.2, 0.15, 0.01, 0.14, 0.1], np.float64))
DRAWS = 8000


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _truncated(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logits, -inf for tokens that are cut: first by epsilon, then by top-k, then by top-p of what is left."""
    logits = np.where(_softmax(logits) < sampling.epsilon, -np.inf, logits)
    order = np.argsort(-logits)
    if sampling.top_k is not None:
        logits[order[sampling.top_k :]] = -np.inf
    if sampling.top_p is not None:
        reached = np.cumsum(_softmax(logits)[order])
        count = 1 + int(np.sum(reached < sampling.top_p))  # the fewest that reach top_p
        logits[order[count:]] = -np.inf
    return logits


def _probabilities(sampling: Sampling) -> np.ndarray:
    if sampling.truncate_before_temperature:  # praxis: masks, then adds Gumbel noise times the temperature
        return _softmax(_truncated(LOGITS.copy(), sampling) / sampling.temperature)
    return _softmax(_truncated(LOGITS / sampling.temperature, sampling))  # transformers: warpers in order


@functools.cache
def _counts(sampling: Sampling) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), DRAWS)
    logits, temperatures = jnp.tile(LOGITS, (DRAWS, 1)), jnp.full(DRAWS, sampling.temperature)
    return np.bincount(np.asarray(choose(logits, keys, temperatures, sampling)), minlength=8)


SETTINGS = [
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"epsilon": 0.12},
    {"top_k": 5, "top_p": 0.7},
    {"epsilon": 0.04, "top_k": 6, "top_p": 0.9},
]


@pytest.mark.parametrize("before", [True, False], ids=["pax", "hugging-face"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_are_those_of_the_definition(settings, before):
    sampling = Sampling(temperature=1.7, truncate_before_temperature=before, **settings)
    expected, counts = _probabilities(sampling), _counts(sampling)
    assert not counts[expected == 0].any()
    assert scipy.stats.chisquare(counts[expected > 0], DRAWS * expected[expected > 0]).pvalue > 0.001


@pytest.mark.parametrize("settings", [{"top_p": 0.6}, {"epsilon": 0.12}], ids=str)
def test_the_orders_differ(settings):
    """At a high temperature, a nucleus of tempered probabilities has more tokens, and so the frequencies differ."""
    pax, other = (Sampling(temperature=1.7, truncate_before_temperature=before, **settings) for before in (True, False))
    expected, counts = _probabilities(other), _counts(pax)
    assert (expected > 0).sum() != (_probabilities(pax) > 0).sum()
    assert set(np.flatnonzero(counts)) != set(np.flatnonzero(expected))


def test_each_row_has_its_own_temperature_and_key():
    keys = jnp.repeat(jax.random.split(jax.random.key(1), 200), 3)
    temperatures = jnp.tile(jnp.array([0.0, 1.0, 1.0]), 200)
    chosen = choose(jnp.tile(LOGITS, (600, 1)), keys, temperatures, Sampling()).reshape(200, 3)
    assert (chosen[:, 0] == 1).all()  # greedy
    np.testing.assert_array_equal(chosen[:, 1], chosen[:, 2])  # the same key
    assert len(np.unique(chosen[:, 1])) > 4
