"""Generation with a cache, against the same model run on the whole text for every token."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.base import SelfAttention
from paxcli.layers.init import Init, Xavier
from paxcli.layers.lora import Lora
from paxcli.layers.matmul import OutputFirst
from paxcli.layers.output_head import OutputHead
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.models import decoding
from paxcli.models.decoding import generate, prefill, unroll_layers
from paxcli.models.language_model import LanguageModel
from paxcli.models.sampling import Sampling, SequenceSettings
from paxcli.models.sequence_model import SequenceModel
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
    return _with_params(config)


def _with_params(config):
    model = fdl.build(config)
    ones = jnp.ones((1, 4), jnp.int32)
    source = dict(source_ids=ones, source_segment_ids=ones, source_segment_pos=ones)
    batch = NestedMap(ids=ones, labels=ones, weights=jnp.ones((1, 4)), segment_ids=ones, segment_pos=ones, **source)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), batch)["params"])
    return model, jax.tree.map(lambda p: 3 * p, params)


def _generate(model, params, seed=0, **settings):
    run = jax.jit(generate, static_argnums=(0, 5))
    return run(model, params, PROMPTS, LENGTHS, seed, Sampling(**{"max_tokens": 6, **settings}))


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, ids):
    positions = jnp.arange(ids.shape[1])[None]
    logits, _ = model.apply({"params": params}, ids, jnp.ones_like(ids), positions, None, method="extend")
    return jax.nn.log_softmax(logits[0])


def _whole_text_log_probs(model, params, ids):
    """Log-probabilities [T, V] by one pass. No token sees the padding behind it, with which all texts are as long."""
    row = np.zeros((1, 16), np.int32)
    row[0, : len(ids)] = ids
    return _forward(model, params, row)[: len(ids)]


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
        np.testing.assert_allclose(result.log_probs[row, length : length + 6], expected[length - 1 :], **FLOAT32)
        assert not result.log_probs[row, :length].any()
    np.testing.assert_array_equal(result.lengths, LENGTHS + 6)


class RunningSum(SelfAttention):
    """A layer whose cache is a state: the sum of what all tokens so far gave."""

    model_dims: int
    num_heads: int
    dims_per_head: int
    num_kv_heads: int | None = None
    params_init: Init = Xavier()

    @nn.nowrap
    def init_cache(self, batch_size, length, dtype):
        return jnp.zeros((batch_size, self.model_dims), dtype)

    @nn.compact
    def __call__(self, x, segment_ids, segment_pos, cache=None):
        w = self.weight("w", self.params_init, (self.model_dims,) * 2, ("embed", None), contracts=(0,), produces=(1,))
        sums = jnp.cumsum(jnp.where((segment_ids != 0)[..., None], x @ w, 0), axis=1)
        if cache is None:
            return jnp.tanh(sums), None
        return jnp.tanh(cache[:, None] + sums), cache + sums[:, -1]


def test_a_recurrent_layer_sees_which_tokens_of_a_prompt_are_padding():
    config = LanguageModel.config(
        vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4
    )
    config.stack.block.attention = RunningSum.partial()
    model, params = _with_params(config)
    state = _generate(model, params)
    for row, length in enumerate(LENGTHS.tolist()):
        ids = state.ids[row, : length + 6]
        log_probs = _whole_text_log_probs(model, params, ids[:-1])
        expected = log_probs[jnp.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(state.log_probs[row, length : length + 6], expected[length - 1 :], **FLOAT32)


def test_prefill_has_the_logits_of_the_next_token(model_and_params):
    model, params = model_and_params
    settings = SequenceSettings(*[jnp.ones(2)] * 6)
    state = jax.jit(prefill, static_argnums=(0, 4, 6))(model, params, PROMPTS, LENGTHS, 6, settings, 16)
    for row, length in enumerate(LENGTHS.tolist()):
        log_probs = _whole_text_log_probs(model, params, PROMPTS[row, :length])
        np.testing.assert_allclose(jax.nn.log_softmax(state.logits[row]), log_probs[-1], **FLOAT32)
    assert not state.log_probs.any()


def test_the_end_token_ends(model_and_params):
    model, params = model_and_params
    free = _generate(model, params)
    eos_ids = (int(free.ids[0, 6]), int(free.ids[1, 4]))
    result = _generate(model, params, eos_ids=eos_ids)
    for row, length in enumerate(LENGTHS.tolist()):
        expected = list(itertools.takewhile(lambda token: token not in eos_ids, free.ids[row, length:].tolist()))
        end = length + len(expected)
        assert bool(result.ended[row]) and int(result.lengths[row]) == end + 1
        assert result.ids[row, length:end].tolist() == expected and int(result.ids[row, end]) in eos_ids
        assert not result.ids[row, end + 1 :].any() and not result.log_probs[row, end + 1 :].any()


def test_no_end_before_the_least_number_of_tokens(model_and_params):
    model, params = model_and_params
    eos_ids = tuple(range(12))
    result = _generate(model, params, min_tokens=3, eos_ids=eos_ids)
    np.testing.assert_array_equal(result.lengths - LENGTHS, [4, 4])
    for row, length in enumerate(LENGTHS.tolist()):
        assert result.ids[row, length : length + 3].tolist() == [12] * 3
        log_probs = _whole_text_log_probs(model, params, result.ids[row, : length + 3])
        expected = log_probs[jnp.arange(length - 1, length + 2), 12]  # of all tokens, those excluded too
        np.testing.assert_allclose(result.log_probs[row, length : length + 3], expected, **FLOAT32)


def test_sampling_is_repeatable(model_and_params):
    model, params = model_and_params
    first, second, other = (_generate(model, params, seed, temperature=2.0).ids for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("kind", [LanguageModel, SequenceModel])
def test_unrolled_layers_decode_as_scanned_ones(kind):
    sizes = dict(vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4)
    config = kind.config(**sizes)
    if kind is LanguageModel:  # two layers before two of each kind
        block = config.stack.block
        windowed = fdl.copy_with(block, attention=fdl.copy_with(block.attention, window=2))
        config.stack, config.num_layers = PatternedStack.partial(turns=(windowed, block), first=block, num_first=2), 6
    scanned, params = _with_params(config)
    expected = _generate(scanned, params, max_tokens=3)
    model, convert = unroll_layers(scanned)
    per_layer = convert(params, True)
    found = _generate(model, per_layer, max_tokens=3)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, **FLOAT32)
    assert sum(p.size for p in jax.tree.leaves(per_layer)) == sum(p.size for p in jax.tree.leaves(params))
    assert not any("'layers'" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(per_layer))
    assert convert({}, True) == {}


def _stored_output_first(params):
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, OutputFirst))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if hasattr(leaf, "order")}


@pytest.mark.parametrize(("is_batch", "num_parts"), [(False, 1), (True, 2)])
def test_on_a_cpu_weights_are_stored_as_outputs_and_inputs(is_batch: bool, num_parts: int):
    config = LanguageModel.config(
        vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4, num_kv_heads=2
    )
    config.stack.block.feed_forward.gated = True
    config.head = OutputHead.partial()
    model, params = _with_params(config)
    expected = _generate(model, params)
    on_cpu, convert = unroll_layers(model)
    converted = convert(params, is_batch)
    names = [f"attention/{name}" for name in ("query", "key", "value", "post")]
    names += [f"feed_forward/{name}" for name in ("w_in", "w_gate", "w_out")]
    of_layers = {f"stack/layers_{layer}/{name}" for layer in range(2) for name in names}
    assert _stored_output_first(converted) == of_layers | {"head/w"}
    assert len(converted["stack"]["layers_0"]["feed_forward"]["w_out"].parts) == num_parts
    found = _generate(on_cpu, converted)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, **FLOAT32)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_elsewhere_weights_are_stored_as_they_are(platform: str, monkeypatch):
    """Each layer's of its own on a GPU; those of a TPU stay stacked."""
    config = LanguageModel.config(
        vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4
    )
    scanned, params = _with_params(config)
    expected = _generate(scanned, params)
    monkeypatch.setattr(decoding, "current_device", lambda: SimpleNamespace(platform=platform))
    model, convert = unroll_layers(scanned)
    converted = convert(params, True)
    assert _stored_output_first(converted) == set()
    assert set(converted["stack"]) == ({"layers"} if platform == "tpu" else {"layers_0", "layers_1"})
    np.testing.assert_array_equal(_generate(model, converted).ids, expected.ids)


def test_weights_with_adapters_are_stored_as_they_are():
    config = LanguageModel.config(
        vocab_size=13, max_seq_len=16, model_dims=16, hidden_dims=32, num_layers=2, num_heads=4
    )
    config.lora = Lora.config()
    model, params = _with_params(config)
    on_cpu, convert = unroll_layers(model)
    converted = convert(params, True)
    assert _stored_output_first(converted) == set()
    np.testing.assert_array_equal(_generate(on_cpu, converted).ids, _generate(model, params).ids)
