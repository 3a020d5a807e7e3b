"""Generation with a cache, against the same model run on the whole text for every token."""

from __future__ import annotations

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.attention.rotary import Rotary
from paxcli.models.decoding import Sampling, choose, generate
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.tolerances import FLOAT32

PROMPTS = jnp.array([[3, 1, 4, 1], [5, 9, 0, 0]])
LENGTHS = jnp.array([4, 2])


@pytest.fixture(
    scope="module", params=["scan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unrolled", "rotary"))]
)
def model_and_params(request):
    config = LanguageModel.config(
        vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4, num_kv_heads=2
    )
    config.stack.scan = request.param != "unrolled"
    if request.param == "rotary":
        config.position, config.stack.block.attention.rotary = None, Rotary.partial()
    model = fdl.build(config)
    ones = jnp.ones((1, 4), jnp.int32)
    batch = NestedMap(ids=ones, labels=ones, weights=jnp.ones((1, 4)), segment_ids=ones, segment_pos=ones)
    params = nn.meta.unbox(model.init(jax.random.key(0), batch)["params"])
    return model, jax.tree.map(lambda p: 3 * p, params)


GREEDY = Sampling()


def _generate(model, params, sampling=GREEDY, eos_id=None, seed=0, max_tokens=6):
    run = jax.jit(generate, static_argnums=(0, 5, 6, 7))
    return run(model, params, PROMPTS, LENGTHS, jax.random.key(seed), max_tokens, eos_id, sampling)


def _whole_text_log_probs(model, params, ids):
    ids = jnp.asarray(ids)[None]
    positions = jnp.arange(ids.shape[1])[None]
    logits, _ = model.apply({"params": params}, ids, jnp.ones_like(ids), positions, None, method="extend")
    return jax.nn.log_softmax(logits[0])


def test_greedy_equals_one_pass_a_token(model_and_params):
    model, params = model_and_params
    result = _generate(model, params)
    for row, length in enumerate(LENGTHS):
        ids = list(np.asarray(PROMPTS[row, :length]))
        for _ in range(6):
            ids.append(int(jnp.argmax(_whole_text_log_probs(model, params, ids)[-1])))
        np.testing.assert_array_equal(result.ids[row, : length + 6], ids)
        log_probs = _whole_text_log_probs(model, params, ids[:-1])
        expected = log_probs[jnp.arange(len(ids) - 1), jnp.array(ids[1:])]
        np.testing.assert_allclose(result.log_probs[row, 1 : length + 6], expected, **FLOAT32)
    np.testing.assert_array_equal(result.lengths, LENGTHS + 6)


def test_the_end_token_ends(model_and_params):
    model, params = model_and_params
    eos_id = int(_generate(model, params).ids[0, 5])
    result = _generate(model, params, eos_id=eos_id)
    assert bool(result.ended[0]) and int(result.lengths[0]) == 4 + 1 + int(result.ids[0, 4] != eos_id)
    assert int(result.ids[0, int(result.lengths[0]) - 1]) == eos_id
    assert not result.ids[0, int(result.lengths[0]) :].any()


def test_sampling_is_repeatable(model_and_params):
    model, params = model_and_params
    hot = Sampling(temperature=2.0)
    first, second, other = (_generate(model, params, hot, seed=seed).ids for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=0.0), {1}),
        (Sampling(temperature=1.0, top_k=1), {1}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.5), {1}),
        (Sampling(temperature=1.0, top_p=0.85), {1, 3}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
    ],
)
def test_which_tokens_can_be_chosen(sampling, allowed):
    logits = jnp.log(jnp.array([[0.1, 0.55, 0.05, 0.3]]))
    chosen = jax.vmap(lambda key: choose(logits, key, sampling)[0])(jax.random.split(jax.random.key(0), 400))
    assert set(np.asarray(chosen).tolist()) == allowed


def test_sampling_follows_the_probabilities():
    logits = jnp.log(jnp.array([[0.1, 0.55, 0.05, 0.3]]))
    keys = jax.random.split(jax.random.key(1), 4000)
    chosen = jax.vmap(lambda key: choose(logits, key, Sampling(temperature=1.0))[0])(keys)
    shares = np.bincount(np.asarray(chosen), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.55, 0.05, 0.3], atol=0.03)
