"""What is masked, what is seen, and the loss, against numbers computed another way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy.stats import chi2

from paxcli.errors import ConfigError
from paxcli.inputs.synthetic import SyntheticInput
from paxcli.models.base import MASKING, DecodingModel
from paxcli.models.masked_language_model import MaskedLanguageModel
from paxcli.nested_map import NestedMap
from tests.models import transformer_in_numpy as plain
from tests.tolerances import FLOAT32

V, T, D = 400, 32, 16


def _model(**fields) -> MaskedLanguageModel:
    widths = dict(vocab_size=V, max_seq_len=T, model_dims=D, hidden_dims=32, num_layers=2, num_heads=4)
    return MaskedLanguageModel(**widths, position=None, **fields)


def _batch(batch_size: int = 2) -> NestedMap:
    return jax.tree.map(jnp.asarray, SyntheticInput(batch_size=batch_size, seq_len=T, vocab_size=V).get_next())


def _masked(labels, weights, key=None, **fields):
    rngs = {} if key is None else {MASKING: jax.random.key(key)}
    return map(np.asarray, _model(**fields).apply({}, labels, weights, method="mask", rngs=rngs))


@pytest.fixture(scope="module")
def params() -> dict:
    return plain.random_params(_model(), _batch())


@pytest.mark.parametrize("key", [None, 3])
def test_shares_of_masked_replaced_and_kept_tokens(key):
    labels = jax.random.randint(jax.random.key(0), (128, 512), 1, V)
    is_token = jnp.arange(512) < 400
    ids, weights = _masked(labels, jnp.broadcast_to(is_token, labels.shape).astype(jnp.float32), key)
    labels, count = np.asarray(labels)[:, :400], 128 * 400
    assert not weights[:, 400:].any() and set(np.unique(weights)) == {0, 1}
    ids, chosen = ids[:, :400], weights[:, :400] == 1
    is_mask, is_same = ids == 0, ids == labels
    assert (is_same | chosen).all()
    for share, expected in (
        (chosen, 0.15),
        (is_mask & chosen, 0.12 + 0.015 / V),
        (~is_mask & ~is_same, 0.015 * (1 - 2 / V)),
        (is_same & chosen, 0.015 * (1 + 1 / V)),
    ):
        deviation = np.sqrt(expected * (1 - expected) / count)
        assert abs(share.sum() / count - expected) < 4 * deviation
    replaced = ids[~is_mask & ~is_same]
    assert replaced.min() < 0.05 * V and replaced.max() > 0.95 * V
    # Every position is chosen as often as any other, within five deviations of a count.
    assert np.abs(chosen.sum(axis=0) - 0.15 * 128).max() < 5 * np.sqrt(0.15 * 0.85 * 128)


@pytest.mark.parametrize("probs", [(0.12, 0.015, 0.015), (0.1, 0.2, 0.3)])
def test_kinds_of_tokens_have_the_distribution_of_praxis(probs):
    """Chi-square of the four kinds, whose chances praxis multiplies, and of the tokens that replace others."""
    mask, random, same = probs
    labels = jax.random.randint(jax.random.key(1), (64, 512), 0, V - 1)
    ids, weights = _masked(
        labels, jnp.ones(labels.shape), key=11, mask_prob=mask, random_prob=random, same_prob=same, mask_id=V - 1
    )
    total = mask + random + same
    chances = [1 - total, total * (mask / total), total * (1 - mask / total) * (random / (random + same))]
    chances.append(1 - sum(chances))
    other = 1 - 2 / V  # a random token may be the mask or the token itself
    chances = [chances[0], chances[1] + chances[2] / V, chances[2] * other, chances[3] + chances[2] / V]
    labels = np.asarray(labels)
    kinds = [weights == 0, ids == V - 1, (ids != V - 1) & (ids != labels), (ids == labels) & (weights == 1)]
    assert _chi_square([kind.sum() for kind in kinds], np.array(chances) * labels.size) > 1e-3
    drawn = np.bincount(ids[kinds[2]], minlength=V)
    drawn = drawn[: V - 1].reshape(-1, 3).sum(1)
    assert _chi_square(drawn, np.full(len(drawn), drawn.mean())) > 1e-3


def _chi_square(counts, expected) -> float:
    """The chance of counts at least as far from those that are expected."""
    counts = np.asarray(counts, float)
    return float(chi2.sf(np.sum((counts - expected) ** 2 / expected), len(counts) - 1))


@pytest.mark.parametrize("probs", [(0.9, 0.2, 0.0), (0.0, 0.0, 0.0)])
def test_shares_that_no_tokens_can_have_are_refused(probs):
    fields = dict(zip(("mask_prob", "random_prob", "same_prob"), probs, strict=True))
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        _masked(jnp.ones((1, T), jnp.int32), jnp.ones((1, T)), **fields)


def test_evaluation_masks_a_row_alike_in_every_batch_and_training_does_not():
    labels = jax.random.randint(jax.random.key(1), (6, T), 1, V)
    ones = jnp.ones(labels.shape)
    ids, weights = _masked(labels, ones)
    for rows in (slice(1, 4), slice(None, None, -1)):
        some_ids, some_weights = _masked(labels[rows], ones[rows])
        np.testing.assert_array_equal(some_ids, ids[rows])
        np.testing.assert_array_equal(some_weights, weights[rows])
    assert len({row.tobytes() for row in weights}) == 6
    (first, _), (second, _), (again, _) = (_masked(labels, ones, key) for key in (5, 6, 5))
    assert (first != second).any() and (first == again).all()


def _predict(model, params, batch):
    return jax.jit(functools.partial(model.apply, method="compute_predictions"))({"params": params}, batch)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_numpy(params, label_smoothing):
    """The whole model on a packed row, and its smoothed loss as optax computes it from soft labels."""
    batch = _batch(1)
    segments = jnp.where(jnp.arange(T) < 10, 1, jnp.where(jnp.arange(T) < 29, 2, 0))[None]
    batch.segment_ids, batch.weights = segments, (segments != 0).astype(jnp.float32)
    model = _model(label_smoothing=label_smoothing, mask_prob=0.5, random_prob=0.2)
    metrics, _ = jax.jit(model.apply)({"params": params}, batch)
    predictions = _predict(model, params, batch)

    ids, weights = (part[0] for part in _masked(batch.labels, batch.weights, mask_prob=0.5, random_prob=0.2))
    p, own = jax.tree.map(np.asarray, params), np.asarray(segments[0])
    table = p["embedding"]["table"].astype(np.float64)
    x = plain.norm(plain.encode(table[ids], p["stack"], own[:, None] == own[None]), p["final_norm"])
    logits = x @ table.T
    np.testing.assert_allclose(predictions.logits[0], logits, **FLOAT32)

    one_hot = jax.nn.one_hot(batch.labels[0], V)
    soft = one_hot * (1 - label_smoothing) + (1 - one_hot) * label_smoothing / (V - 1)
    for name, target in (("loss", soft), ("log_pplx", one_hot)):
        xent = optax.softmax_cross_entropy(jnp.asarray(logits, jnp.float32), target)
        np.testing.assert_allclose(metrics[name][0], jnp.average(xent, weights=weights), rtol=1e-5)
        assert metrics[name][1] == weights.sum() > 10


def test_masks_of_the_data_are_used(params):
    batch = _batch()
    batch.masked_ids = batch.labels.at[:, 4].set(7)
    batch.masked_pos = jnp.zeros(batch.ids.shape).at[:, 4].set(1)
    metrics, _ = jax.jit(_model().apply)({"params": params}, batch)
    logits = _predict(_model(), params, batch).logits
    expected = optax.softmax_cross_entropy_with_integer_labels(logits[:, 4], batch.labels[:, 4])
    np.testing.assert_allclose(metrics["loss"][0], expected.mean(), rtol=1e-5)
    assert metrics["loss"][1] == 2


def test_a_mask_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="mask_id=400"):
        _model(mask_id=V).init(jax.random.key(0), _batch())


def test_it_does_not_decode():
    assert not isinstance(_model(), DecodingModel)
