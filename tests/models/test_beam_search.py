"""Beam search, against all sequences of a small vocabulary, and against a search in plain Python."""

from __future__ import annotations

import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.models.beam_search import Beams, BeamSearch, beam_search
from paxcli.models.decoding import cache_axes, prefill
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import SequenceSettings
from paxcli.models.sequence_model import SequenceModel
from paxcli.nested_map import NestedMap
from tests.tolerances import FLOAT32

V, EOS, BOS = 5, (1, 3), 2
SIZES = {"vocab_size": V, "max_seq_len": 12, "model_dims": 16, "hidden_dims": 32, "num_layers": 2, "num_heads": 2}
PROMPTS = np.array([[2, 4, 0, 2], [4, 2, 0, 0]])
LENGTHS = np.array([4, 2])


@functools.cache
def model_and_params(kind: type):
    model, ones = kind(**SIZES), jnp.ones((1, 4), jnp.int32)
    names = ("ids", "labels", "segment_ids", "segment_pos", "source_ids", "source_segment_ids", "source_segment_pos")
    batch = NestedMap({name: ones for name in names}, weights=jnp.ones((1, 4)))
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(3), batch)["params"])
    return model, jax.tree.map(lambda p: 4 * p, params)


def search(kind: type, limits: list[int], **settings) -> Beams:
    """The beams of the two prompts."""
    model, params = model_and_params(kind)
    beam, longest = BeamSearch(**settings, eos_ids=EOS), max(limits)

    @jax.jit
    def run(params):
        size = 4 + longest
        prompts = prefill(
            model,
            params,
            jnp.array(PROMPTS),
            jnp.array(LENGTHS),
            jnp.array(limits),
            SequenceSettings(*[jnp.ones(2)] * 6),
            size,
            bos_id=BOS,
        )
        return beam_search(model, params, prompts, cache_axes(model, params, size), longest, beam)

    return jax.device_get(run(params))


@functools.cache
def _forward(kind: type):
    """Log-probabilities after each token of rows [B, T], in full passes."""
    model, params = model_and_params(kind)

    @jax.jit
    def run(ids, source):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        batch = NestedMap(ids=ids, segment_ids=jnp.ones_like(ids), segment_pos=positions)
        if kind is SequenceModel:
            batch.source_ids, batch.source_segment_ids = source, (source >= 0).astype(jnp.int32)
            batch.source_segment_pos, batch.source_ids = jnp.arange(4)[None], jnp.maximum(source, 0)
        return jax.nn.log_softmax(model.apply({"params": params}, batch, method="compute_predictions").logits)

    return run


def next_log_probs(kind: type, row: int, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [V] of the token after the generated `tokens` of a row."""
    prompt = PROMPTS[row, : LENGTHS[row]]
    before = (BOS, *tokens) if kind is SequenceModel else (*prompt, *tokens)
    ids = np.zeros((1, 12), np.int32)
    ids[0, : len(before)] = before
    source = np.where(np.arange(4) < LENGTHS[row], PROMPTS[row], -1)[None]
    return np.asarray(_forward(kind)(ids, source)[0, len(before) - 1], np.float64)


def normalize(log_prob: float, length: int, alpha: float) -> float:
    return log_prob / ((length + 5) / 5) ** alpha


def search_in_python(kind: type, row: int, limit: int, beam: BeamSearch) -> list[tuple[float, tuple[int, ...]]]:
    """Score and tokens of the best sequences: those that end, or else those of `limit` tokens."""
    live, ended = [(0.0, ())], []
    per_beam = min(beam.tokens_per_beam or beam.beam_size, V)
    for step in range(limit):
        longer = []
        for score, tokens in live:
            log_probs = next_log_probs(kind, row, tokens)
            if step >= beam.min_tokens:
                best = max(EOS, key=lambda token: log_probs[token])
                ended.append((normalize(score + log_probs[best], step + 1, beam.length_norm_alpha), (*tokens, best)))
            else:
                log_probs[list(EOS)] = -np.inf
            likely = np.argsort(-log_probs)[:per_beam].tolist()
            longer += [(score + log_probs[t], (*tokens, t)) for t in likely if t not in EOS]
        live = sorted(longer, reverse=True)[: beam.beam_size]
        ended = sorted(ended, reverse=True)[: beam.beam_size]
    rest = [(normalize(score, limit, beam.length_norm_alpha), tokens) for score, tokens in live]
    return [*ended, *sorted(rest, reverse=True)][: beam.beam_size]


def check(beams: Beams, row: int, expected: list[tuple[float, tuple[int, ...]]]) -> None:
    for place, (score, tokens) in enumerate(expected):
        assert tuple(beams.ids[row, place, : beams.lengths[row, place]].tolist()) == tokens, (row, place)
        assert beams.ended[row, place] == (tokens[-1] in EOS)
        np.testing.assert_allclose(beams.scores[row, place], score, rtol=1e-5)
        assert not beams.ids[row, place, len(tokens) :].any()
    assert np.isinf(beams.scores[row, len(expected) :]).all()


@pytest.mark.parametrize("kind", [LanguageModel, pytest.param(SequenceModel, marks=pytest.mark.slow)])
def test_a_wide_beam_finds_the_best_of_all_sequences(kind):
    """4 tokens of 5 ids, of which 2 end a sequence, so at most 27 sequences are live."""
    beams = search(kind, [4, 4], beam_size=27)
    for row in range(2):
        found = []
        for tokens in itertools.chain.from_iterable(itertools.product(range(V), repeat=n) for n in range(1, 5)):
            if tokens[-1] in EOS and not set(tokens[:-1]) & set(EOS):
                before = [next_log_probs_cached(kind, row, tokens[:n])[tokens[n]] for n in range(len(tokens))]
                found.append((normalize(math.fsum(before), len(tokens), 0.8), tokens))
        best_ends: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        for score, tokens in found:  # of two sequences that differ in the end token only, one is kept
            best_ends[tokens[:-1]] = max(best_ends.get(tokens[:-1], (-math.inf, ())), (score, tokens))
        check(beams, row, sorted(best_ends.values(), reverse=True)[:27])


@functools.cache
def next_log_probs_cached(kind: type, row: int, tokens: tuple[int, ...]) -> np.ndarray:
    return next_log_probs(kind, row, tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"beam_size": 2, "tokens_per_beam": 4, "length_norm_alpha": 2.0},
        pytest.param({"beam_size": 3}, marks=pytest.mark.slow),
        pytest.param({"beam_size": 2, "length_norm_alpha": 0.0}, marks=pytest.mark.slow),
        pytest.param({"beam_size": 3, "min_tokens": 6}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_narrow_beam_is_that_of_plain_python(settings):
    """Rows have limits of their own."""
    limits = [7, 5]
    beams = search(LanguageModel, limits, **settings)
    for row, limit in enumerate(limits):
        check(beams, row, search_in_python(LanguageModel, row, limit, BeamSearch(**settings)))
    for row, tokens in enumerate(beams.ids[:, 0]):
        length = int(beams.lengths[row, 0])
        expected = [next_log_probs(LanguageModel, row, tuple(tokens[:n].tolist()))[tokens[n]] for n in range(length)]
        np.testing.assert_allclose(beams.log_probs[row, 0, :length], expected, **FLOAT32)


def test_more_samples_than_beams():
    with pytest.raises(ConfigError, match="num_samples=3 is more than beam_size=2"):
        BeamSearch(beam_size=2, num_samples=3)
