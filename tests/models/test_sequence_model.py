"""The encoder-decoder against numpy, and its decoding against itself without a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.inputs.synthetic import SyntheticPairs
from paxcli.layers.attention.cross_attention import CrossAttention
from paxcli.layers.decoder import Decoder
from paxcli.models.decoding import generate
from paxcli.models.sampling import Sampling
from paxcli.models.sequence_model import SequenceModel
from paxcli.nested_map import NestedMap
from tests.models import transformer_in_numpy as plain
from tests.tolerances import FLOAT32

V, T, D = 23, 7, 16
MODEL = SequenceModel(
    vocab_size=V, max_seq_len=T, model_dims=D, hidden_dims=32, num_layers=2, num_encoder_layers=3, num_heads=4
)


def _batch(**fields) -> NestedMap:
    source = SyntheticPairs(batch_size=4, seq_len=T, vocab_size=V, **fields)
    return jax.tree.map(jnp.asarray, source.get_next())


@pytest.fixture(scope="module")
def params() -> dict:
    return plain.random_params(MODEL, _batch())


def _packed() -> NestedMap:
    """Two pairs in a row, the target of each with its own source, and a row with a lone pair."""
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    source_segments = jnp.array([[1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0, 0]])
    positions = jnp.array([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 0]])
    source_positions = jnp.array([[0, 1, 0, 1, 2, 3, 0], [0, 1, 2, 0, 0, 0, 0]])
    ids, labels, source = jax.random.randint(jax.random.key(1), (3, 2, T), 0, V)
    return NestedMap(
        ids=ids,
        labels=labels,
        weights=(segments != 0) * jnp.array([[1.0], [0.5]]),
        segment_ids=segments,
        segment_pos=positions,
        source_ids=source,
        source_segment_ids=source_segments,
        source_segment_pos=source_positions,
    )


def _loss_in_numpy(params: dict, batch: NestedMap) -> float:
    batch, p = jax.tree.map(np.asarray, (batch, params))
    table, total = p["embedding"]["table"].astype(np.float64), 0.0
    for row in range(len(batch.ids)):
        own, other = batch.segment_ids[row], batch.source_segment_ids[row]
        source = table[batch.source_ids[row]] + plain.sinusoids(batch.source_segment_pos[row], D)
        source = plain.norm(plain.encode(source, p["encoder"], other[:, None] == other[None]), p["encoder_norm"])
        x = table[batch.ids[row]] + plain.sinusoids(batch.segment_pos[row], D)
        own_visible = (own[:, None] == own[None]) & np.tril(np.ones((T, T), bool))
        x = plain.decode(x, source, p["decoder"], own_visible, own[:, None] == other[None])
        logits = plain.norm(x, p["final_norm"]) @ table.T
        total += sum(
            weight * plain.cross_entropy(scores, label)
            for weight, scores, label in zip(batch.weights[row], logits, batch.labels[row], strict=True)
        )
    return total / batch.weights.sum()


@pytest.mark.parametrize("make", [_batch, _packed])
def test_the_loss_is_that_of_numpy(params, make):
    batch = make()
    metrics, _ = jax.jit(MODEL.apply)({"params": params}, batch)
    np.testing.assert_allclose(metrics["loss"][0], _loss_in_numpy(params, batch), rtol=1e-5)
    assert metrics["loss"][1] == batch.weights.sum()


def test_scanned_is_unrolled(params):
    model = MODEL.clone(decoder=functools.partial(Decoder, scan=False, remat_policy="everything"))
    layers = params["decoder"]["layers"]
    unrolled = {f"layers_{i}": jax.tree.map(lambda p, i=i: p[i], layers) for i in range(2)}
    batch = _batch()
    ours, _ = jax.jit(MODEL.apply)({"params": params}, batch)
    theirs, _ = jax.jit(model.apply)({"params": {**params, "decoder": unrolled}}, batch)
    np.testing.assert_allclose(ours["loss"][0], theirs["loss"][0], **FLOAT32)


def test_greedy_decoding_equals_full_passes(params):
    """With the caches, against the whole target computed anew for each token."""
    batch, bos, sampling = _batch(), 0, Sampling(max_tokens=T - 1)
    lengths = batch.source_segment_ids.sum(axis=1)
    found = jax.jit(generate, static_argnums=(0, 5))(MODEL, params, batch.source_ids, lengths, 0, sampling)
    forward = jax.jit(lambda b: MODEL.apply({"params": params}, b, method="compute_predictions").logits)
    ids, log_probs = np.full((4, T), bos, np.int32), np.zeros((4, T))
    for place in range(T - 1):
        everywhere = {"segment_ids": jnp.ones_like(batch.ids), "segment_pos": jnp.tile(jnp.arange(T), (4, 1))}
        logits = forward(NestedMap(batch | everywhere | {"ids": jnp.asarray(ids)}))[:, place]
        ids[:, place + 1] = np.argmax(logits, axis=-1)
        log_probs[:, place + 1] = np.max(jax.nn.log_softmax(logits), axis=-1)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.log_probs, log_probs, **FLOAT32)


@pytest.mark.parametrize("target", ["copy", "reversed"])
def test_pairs_are_what_they_say(target):
    batch = jax.tree.map(np.asarray, _batch(target=target))
    for row in range(4):
        count = int(batch.weights[row].sum())
        source, labels = batch.source_ids[row][:count], batch.labels[row][:count]
        assert source[-1] == labels[-1] == 1 and (source[:-1] >= 2).all()
        np.testing.assert_array_equal(labels[:-1], source[:-1] if target == "copy" else source[:-1][::-1])
        np.testing.assert_array_equal(batch.ids[row][:count], [0, *labels[:-1]])


def test_cross_attention_has_no_order():
    x, ones = jnp.ones((1, 2, 8)), jnp.ones((1, 2), jnp.int32)
    layer = CrossAttention(model_dims=8, num_heads=2, dims_per_head=4, causal=True)
    with pytest.raises(ConfigError, match="no order"):
        layer.init(jax.random.key(0), x, ones, x, ones)
