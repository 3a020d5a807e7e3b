"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2), compared with its equations in plain numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.inputs.base_input import language_spec
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.training.task import Metrics
from tests.models import transformer_in_numpy as plain
from tests.tolerances import FLOAT32

B, T, V, D = 2, 12, 37, 8
SIZES = dict(vocab_size=V, max_seq_len=T, model_dims=D, hidden_dims=12, num_layers=2, num_heads=2)
MODEL = LanguageModel(**SIZES, mtp_num_layers=2)


def batch_of_segments() -> NestedMap:
    """Two rows, the first with two segments; the labels of one position do not count."""
    ids = jax.random.randint(jax.random.key(1), (B, T), 0, V)
    segment_ids = jnp.array([[1] * 5 + [2] * 7, [1] * 12])
    segment_pos = jnp.array([[*range(5), *range(7)], [*range(12)]])
    weights = jnp.ones((B, T)).at[1, 4].set(0)
    labels = jax.random.randint(jax.random.key(2), (B, T), 0, V)
    return NestedMap(ids=ids, labels=labels, weights=weights, segment_ids=segment_ids, segment_pos=segment_pos)


BATCH = batch_of_segments()


@pytest.fixture(scope="module")
def params() -> dict:
    return plain.random_params(MODEL, BATCH)


def metrics_of(model: LanguageModel, params: dict) -> dict:
    return jax.jit(lambda params: model.loss_and_metrics(params, BATCH)[0])(params)


def mean_loss_in_numpy(params: dict) -> float:
    """Segment by segment: position t of depth k reads the token t + k, and predicts the token t + k + 1."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = p["embedding"]["table"]
    totals, counts = np.zeros(2), np.zeros(2)
    for row in range(B):
        for segment in np.unique(BATCH.segment_ids[row]):
            at = np.flatnonzero(BATCH.segment_ids[row] == segment)
            ids, labels, weights = (np.asarray(BATCH[name][row])[at] for name in ("ids", "labels", "weights"))
            visible = np.tri(len(at), dtype=bool)
            x = plain.encode(table[ids] + p["position"]["table"][: len(at)], p["stack"], visible)
            for depth in range(2):
                q = p[f"mtp_{depth}"]
                # The tokens depth + 1 after each position. Beyond the segment nothing is predicted, and nobody looks.
                following = np.concatenate([labels[depth:], np.zeros(depth, int)])
                joined = [plain.norm(table[following], q["embedding_norm"]), plain.norm(x, q["hidden_norm"])]
                x = plain.encode(np.concatenate(joined, axis=-1) @ q["projection"]["w"], q["stack"], visible)
                logits = plain.norm(x, p["final_norm"]) @ table.T
                for t in range(len(at) - depth - 1):
                    weight = weights[t + depth + 1]
                    totals[depth] += weight * plain.cross_entropy(logits[t], labels[t + depth + 1])
                    counts[depth] += weight
    return float(totals.sum() / counts.sum())


def test_the_loss_is_that_of_the_equations(params: dict) -> None:
    np.testing.assert_allclose(metrics_of(MODEL, params)["mtp_loss"][0], mean_loss_in_numpy(params), **FLOAT32)


@pytest.mark.parametrize("depths", [1, 2])
def test_an_evaluation_weighs_the_tokens_that_are_predicted(params: dict, depths: int) -> None:
    """Batches whose main losses have other weights than those of the further tokens were averaged by the former."""
    model, own = MODEL.clone(mtp_num_layers=depths), {k: v for k, v in params.items() if depths == 2 or k != "mtp_1"}
    batch = NestedMap({**BATCH, "weights": BATCH.weights.at[0, 1:].set(0)})  # of row 0, the first target alone counts
    find = jax.jit(lambda batch: Metrics().of_batch(model.loss_and_metrics(own, batch)[0]))
    rows = [find(jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(B)]
    found, expected = (Metrics().combine(batches)["mtp_loss"] for batches in (rows, [find(batch)]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert float(rows[0]["mtp_loss"][1]) == 0


def test_in_chunks_of_tokens_loss_and_gradients_are_the_same(params: dict) -> None:
    def loss(params: dict, model: LanguageModel) -> jax.Array:
        return metrics_of(model, params)["mtp_loss"][0]

    found, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(params, model) for model in (MODEL.clone(loss_chunk=5), MODEL)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(expected["mtp_1"]["projection"]))


def test_the_model_without_it_has_the_same_loss_and_decodes_alike(params: dict) -> None:
    rest = {name: value for name, value in params.items() if not name.startswith("mtp_")}
    without = LanguageModel(**SIZES)
    found, expected = metrics_of(MODEL, params), metrics_of(without, rest)
    assert found.keys() - expected.keys() == {"mtp_loss"}
    np.testing.assert_array_equal(found["loss"][0], expected["loss"][0])
    arguments = (BATCH.ids, BATCH.segment_ids, BATCH.segment_pos, None)
    ours, theirs = (
        jax.jit(functools.partial(model.apply, method="extend"))({"params": own}, *arguments)[0]
        for model, own in ((MODEL, params), (without, rest))
    )
    np.testing.assert_array_equal(ours, theirs)


def test_flops_by_hand() -> None:
    spec = language_spec(B, T)
    one = LanguageModel(**{**SIZES, "num_layers": 1}).forward_flops(spec)
    none, found = LanguageModel(**SIZES).forward_flops(spec), MODEL.forward_flops(spec)
    # Each prediction: a layer, the logits, and a projection of [2 D] to [D].
    assert one is not None and none is not None and found is not None
    assert found.total == none.total + 2 * (one.total + 2 * B * T * 2 * D * D)
