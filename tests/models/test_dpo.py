"""DPO: loss and gradients are those of the published formulas, in float64 numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from paxcli.errors import ConfigError
from paxcli.layers.lora import Lora
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.models import chunked_loss
from paxcli.models.dpo import Dpo
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.tolerances import FLOAT32

SIZES = {"vocab_size": 29, "max_seq_len": 8, "model_dims": 16, "hidden_dims": 16, "num_layers": 1, "num_heads": 2}


def dpo_loss(scores: np.ndarray, reference: np.ndarray, beta: float, label_smoothing: float) -> np.ndarray:
    """The loss of each pair (conservative DPO: Mitchell, 2023); without smoothing, that of TRL's type `sigmoid`."""
    logits = (scores[:, 0] - scores[:, 1]) - (reference[:, 0] - reference[:, 1])

    def log_sigmoid(x: np.ndarray) -> np.ndarray:
        return -np.logaddexp(0, -x)

    return -log_sigmoid(beta * logits) * (1 - label_smoothing) - log_sigmoid(-beta * logits) * label_smoothing


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_the_formula(label_smoothing: float) -> None:
    rng = np.random.default_rng(0)
    scores, reference = rng.normal(-20, 6, (2, 5, 2))
    weights = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    dpo = Dpo(beta=0.3, label_smoothing=label_smoothing)

    def loss(scores) -> jax.Array:
        return dpo.metrics(scores, jnp.float32(reference), jnp.float32(weights))["loss"][0]

    def expected_loss(scores: np.ndarray) -> float:
        return float((dpo_loss(scores, reference, 0.3, label_smoothing) * weights).sum() / weights.sum())

    value, gradient = jax.value_and_grad(loss)(jnp.float32(scores))
    np.testing.assert_allclose(value, expected_loss(scores), rtol=1e-6)
    for index in np.ndindex(scores.shape):
        up, down = scores.copy(), scores.copy()
        up[index], down[index] = up[index] + 1e-5, down[index] - 1e-5
        np.testing.assert_allclose(
            gradient[index], (expected_loss(up) - expected_loss(down)) / 2e-5, rtol=1e-4, atol=1e-7
        )


def pairs() -> NestedMap:
    """Three pairs; the last is padding."""

    def side(seed: int) -> NestedMap:
        ids = jax.random.randint(jax.random.key(seed), (3, 8), 0, 29)
        weights = jnp.zeros((3, 8)).at[:2, 3:].set(1.0)
        ones = jnp.ones_like(ids)
        labels = jnp.roll(ids, -1, axis=1)
        return NestedMap(ids=ids, labels=labels, weights=weights, segment_ids=ones, segment_pos=jnp.arange(8) * ones)

    return NestedMap({**side(1), "rejected": side(2)})


@pytest.mark.parametrize("lora", [None, pytest.param(Lora(rank=2, targets="attention"), marks=pytest.mark.slow)])
def test_a_model_is_compared_with_its_start(lora: Lora | None) -> None:
    """With the formula, from the log-probabilities of an ordinary model."""
    model = LanguageModel(**SIZES, dpo=Dpo(beta=0.5), lora=lora)
    params = jax.jit(lambda: meta.unbox(model.init(jax.random.key(0), pairs())["params"]))()
    assert ("reference" in params) == (lora is None)
    rng = np.random.default_rng(0)
    start, loss = params, jax.jit(lambda params: model.loss_and_metrics(params, pairs())[0]["loss"][0])
    np.testing.assert_allclose(loss(params), np.log(2), rtol=1e-6)

    def move(path, w):
        frozen = "reference" in str(path) or (lora is not None and "_lora_" not in str(path))
        return w if frozen else w + np.float32(0.1 * rng.standard_normal(w.shape))

    params = jax.tree_util.tree_map_with_path(move, params)

    def scores(model: LanguageModel, params: dict) -> np.ndarray:
        ordinary = model.clone(dpo=None)
        sides = [pairs(), pairs().rejected]
        score = jax.jit(lambda side: ordinary.loss_and_metrics(params, side)[1].scores)
        return np.stack([score(side) for side in sides], 1).astype(np.float64)

    expected = dpo_loss(scores(model, params), scores(model.clone(lora=None), start), 0.5, 0.0)[:2].mean()
    np.testing.assert_allclose(loss(params), expected, rtol=1e-5)
    gradients = jax.jit(jax.grad(loss))(params)
    moved = {str(path) for path, g in jax.tree_util.tree_leaves_with_path(gradients) if np.any(g)}
    assert moved and not any("reference" in path for path in moved)


def test_tokens_instead_of_pairs_are_refused() -> None:
    model = LanguageModel(**SIZES, dpo=Dpo())
    batch = pairs()
    del batch["rejected"]
    with pytest.raises(ConfigError, match="preference pairs"):
        model.loss_and_metrics({}, batch, jax.random.key(0))


def test_a_large_vocabulary_is_not_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(**fields) -> dict:
        model = LanguageModel(**SIZES, **fields, dpo=Dpo())
        params = meta.unbox(model.init(jax.random.key(0), pairs())["params"])
        return jax.jit(jax.grad(lambda params: model.loss_and_metrics(params, pairs())[0]["loss"][0]))(params)

    expected = gradients(loss_chunk=None)
    monkeypatch.setattr(chunked_loss, "_LOGIT_BYTES", {"cpu": (1, 1)})
    for one, other in zip(jax.tree.leaves(gradients()), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **FLOAT32)
    with pytest.raises(ConfigError, match="only the metric `loss` has a gradient"):
        gradients(loss_chunk=4)


def test_stages_with_adapters_are_compared_with_those_without() -> None:
    stages = functools.partial(PipelinedStack, num_stages=2, num_microbatches=2)
    model = LanguageModel(**SIZES | {"num_layers": 2}, dpo=Dpo(), lora=Lora(rank=2, targets="attention"), stack=stages)
    params = jax.jit(lambda: meta.unbox(model.init(jax.random.key(0), pairs())["params"]))()
    loss, gradients = jax.jit(jax.value_and_grad(lambda params: model.loss_and_metrics(params, pairs())[0]["loss"][0]))(
        params
    )
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    assert any(np.any(g) for path, g in jax.tree.leaves_with_path(gradients) if "_lora_b" in str(path))
