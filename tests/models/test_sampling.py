"""The distribution of sampled tokens, against the definitions of Pax and of Hugging Face in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from paxcli.models.sampling import Sampling, SequenceSettings, choose, num_candidates, sequence_settings

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
    of_all, logits = sequence_settings(sampling, 0, 0), jnp.tile(LOGITS, (DRAWS, 1))
    rows = SequenceSettings(*(jnp.full(DRAWS, x) for x in of_all))
    return np.bincount(np.asarray(choose(logits, lambda: keys, rows, num_candidates(of_all), sampling)), minlength=8)


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


def test_each_row_has_its_own_settings_and_key():
    """In one batch, a row that is greedy, one without truncation twice with the same key, and truncated ones."""
    own = [{"temperature": 0.0}, {}, {}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7}]
    settings = [Sampling(**{"temperature": 1.7, **more}) for more in own]
    rows = [sequence_settings(one, 0, 0) for one in settings] * DRAWS
    rows = SequenceSettings(*(jnp.array(column) for column in zip(*rows, strict=True)))
    keys = jnp.repeat(jax.random.split(jax.random.key(1), DRAWS), len(own))
    chosen = choose(jnp.tile(LOGITS, (len(keys), 1)), lambda: keys, rows, num_candidates(rows), Sampling())
    chosen = np.asarray(chosen).reshape(DRAWS, len(own))
    assert (chosen[:, 0] == 1).all()  # greedy
    np.testing.assert_array_equal(chosen[:, 1], chosen[:, 2])  # the same key
    for column, sampling in enumerate(settings[1:], 1):
        expected, counts = _probabilities(sampling), np.bincount(chosen[:, column], minlength=8)
        assert not counts[expected == 0].any()
        assert scipy.stats.chisquare(counts[expected > 0], DRAWS * expected[expected > 0]).pvalue > 0.001


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([{}], 0),
        ([{}, {"top_k": 5}, {"top_k": 3}], 8),
        ([{"top_k": 1}], 1),
        ([{"top_k": 5}, {"top_p": 0.5}], 2**31 - 1),
    ],
)
def test_only_as_many_tokens_are_sorted_as_a_row_needs(own, expected):
    rows = [sequence_settings(Sampling(temperature=1.0, **more), 0, 0) for more in own]
    greedy = sequence_settings(Sampling(top_p=0.1), 0, 0)
    rows = SequenceSettings(*(np.array(column) for column in zip(*rows, greedy, strict=True)))
    assert num_candidates(rows) == expected
