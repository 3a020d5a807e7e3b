from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.attention import attention
from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.causal import causal_attention
from paxcli.layers.attention.relative_bias import RelativeBias
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.xla import dot_product_attention
from paxcli.layers.rms_norm import RmsNorm
from tests.tolerances import BFLOAT16, FLOAT32

B, T, D, N, H = 2, 12, 24, 4, 6


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def _positions(batch: int, length: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(length), (batch, length))


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_jax_nn(kv_heads):
    query, key, value = _normal(0, B, T, N, H), _normal(1, B, T, kv_heads, H), _normal(2, B, T, kv_heads, H)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    ours = jax.jit(dot_product_attention)(*map(_heads_first, (query * H**-0.5, key, value)), mask)
    compute_theirs = functools.partial(jax.nn.dot_product_attention, is_causal=True, scale=H**-0.5)
    theirs = jax.jit(compute_theirs)(query, key, value)
    np.testing.assert_allclose(_heads_first(ours), theirs, **FLOAT32)


def test_gradients_of_sinks_keep_the_small_parts_of_a_long_sum():
    """In bfloat16 too, over 49,152 tokens."""
    rows = [_normal(seed, 4096, N, T, H).astype(jnp.bfloat16) for seed in range(3)]
    sinks, mask = _normal(3, N).astype(jnp.bfloat16), jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (4096, T, T))

    def sum_of_contexts(sinks, *heads):
        return dot_product_attention(*heads, mask, sinks=sinks).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(sum_of_contexts))
    exact = gradient(*(x.astype(jnp.float32) for x in (sinks, *rows)))
    np.testing.assert_allclose(gradient(sinks, *rows).astype(jnp.float32), exact, rtol=0.02)


@pytest.mark.parametrize(
    ("length", "logit_cap", "window"),
    [(12, None, None), (128, 3.0, None), (192, None, None), (256, None, None), (256, 3.0, None)]
    + [(12, None, 1), (12, None, 20), (256, 3.0, 90), (512, None, 7), (512, 3.0, 64)],
)
def test_blocks_equal_one_softmax(length, logit_cap, window):
    """Values and gradients of the blockwise form, in one to eight blocks, against the masked softmax."""
    query, key, value = (_normal(seed, B, N, length, H) for seed in range(3))
    segments = np.where(np.arange(length) < [[length // 3], [length]], 1, 2)
    mask = (segments[:, :, None] == segments[:, None, :]) & np.tril(np.ones((length, length), bool))
    if window is not None:
        mask = mask & np.triu(np.ones((length, length), bool), 1 - window)
    segments, mask = jnp.asarray(segments), jnp.asarray(mask)

    def blockwise(q, k, v):
        y = causal_attention(q, k, v, segments, logit_cap, window)
        return jnp.sum(jnp.sin(y)), y

    def plain(q, k, v):
        y = dot_product_attention(q, k, v, mask, logit_cap)
        return jnp.sum(jnp.sin(y)), y

    ((_, ours), our_gradients), ((_, theirs), their_gradients) = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(query, key, value) for f in (blockwise, plain)
    )
    np.testing.assert_allclose(ours, theirs, **FLOAT32)
    for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(our_gradient, their_gradient, **FLOAT32)


def test_bfloat16_is_near_float32():
    query, key, value = (_normal(seed, B, N, T, H) for seed in range(3))
    ones = jnp.ones((B, T), jnp.int32)
    attend = jax.jit(causal_attention)
    narrow = attend(*(x.astype(jnp.bfloat16) for x in (query, key, value)), ones)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), attend(query, key, value, ones), **BFLOAT16)


def _layer(**fields) -> tuple[Attention, dict]:
    layer = Attention(model_dims=D, num_heads=N, dims_per_head=H, **fields)
    x, ones = _normal(3, B, T, D), jnp.ones((B, T), jnp.int32)
    variables = _unboxed(jax.jit(layer.init)(jax.random.key(4), x, ones, _positions(B, T)))
    return layer, jax.tree.map(lambda p: jnp.asarray(np.asarray(p) + 0.1 * np.asarray(_normal(5, *p.shape))), variables)


def _apply(layer: Attention, *arguments: Any) -> tuple[jax.Array, Any]:
    """`layer.apply`, compiled as one program."""
    return jax.jit(layer.apply)(*arguments)


def _unboxed(variables: dict) -> dict:
    return jax.tree.map(lambda box: box.value, variables, is_leaf=lambda leaf: hasattr(leaf, "names"))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_logit_cap_and_bias_against_numpy(platform, monkeypatch):
    monkeypatch.setattr(attention, "current_device", lambda: types.SimpleNamespace(platform=platform))
    layer, variables = _layer(use_bias=True, logit_cap=2.0)
    p = jax.tree.map(np.asarray, variables["params"])
    x = np.asarray(_normal(6, B, T, D))
    q, k, v = (np.einsum("btd,dnh->btnh", x, p[name]) + p[f"{name}_bias"] for name in ("query", "key", "value"))
    q = q * H**-0.5
    logits = 2 * np.tanh(np.einsum("btnh,bsnh->bnts", q, k) / 2)
    logits = np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("btnh,nhd->btd", np.einsum("bnts,bsnh->btnh", weights, v), p["post"]) + p["post_bias"]
    y, _ = _apply(layer, variables, jnp.asarray(x), jnp.ones((B, T), jnp.int32), _positions(B, T))
    np.testing.assert_allclose(y, expected, **FLOAT32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": 3},
        {"window": 3, "chunked": True, "temperature_growth": 0.5, "temperature_length": 2},
        {"relative_bias": functools.partial(RelativeBias)},
        {"value_dims_per_head": 5},
    ],
)
def test_packed_equals_separate(fields):
    layer, variables = _layer(**fields)
    x = _normal(7, 1, T, D)
    cut = 5
    segments = jnp.where(jnp.arange(T) < cut, 1, 2)[None]
    positions = jnp.where(jnp.arange(T) < cut, jnp.arange(T), jnp.arange(T) - cut)[None]
    packed, _ = _apply(layer, variables, x, segments, positions)
    for part in (slice(0, cut), slice(cut, T)):
        length = part.stop - part.start
        alone, _ = _apply(layer, variables, x[:, part], jnp.ones((1, length), jnp.int32), _positions(1, length))
        np.testing.assert_allclose(packed[:, part], alone, **FLOAT32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 2, "window": 4},
        {"num_kv_heads": 2, "window": 5, "chunked": True, "temperature_growth": 0.5, "temperature_length": 2},
        {"num_kv_heads": 2, "value_dims_per_head": 10, "rotary": functools.partial(Rotary)},
        {"num_kv_heads": 2, "relative_bias": functools.partial(RelativeBias, num_buckets=6, max_distance=9)},
        {"rotary": functools.partial(Rotary), "per_dim_scale": True, "qk_norm": functools.partial(RmsNorm)},
    ],
)
def test_cache_equals_full_pass(fields):
    layer, variables = _layer(**fields)
    x, kv_heads = _normal(8, B, T, D), fields.get("num_kv_heads", N)
    apply = jax.jit(layer.apply)
    full, _ = apply(variables, x, jnp.ones((B, T), jnp.int32), _positions(B, T))
    cache = layer.init_cache(B, T, jnp.float32)
    assert cache.key.shape == (B, kv_heads, H, T)
    prompt = 7
    first, cache = apply(variables, x[:, :prompt], jnp.ones((B, prompt), jnp.int32), _positions(B, prompt), cache)
    outputs = [first]
    for position in range(prompt, T):
        at = jnp.full((B, 1), position)
        y, cache = apply(variables, x[:, position : position + 1], jnp.ones((B, 1), jnp.int32), at, cache)
        outputs.append(y)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), full, **FLOAT32)


def test_per_dim_scale_starts_as_the_fixed_scale():
    plain = Attention(model_dims=D, num_heads=N, dims_per_head=H)
    learned = Attention(model_dims=D, num_heads=N, dims_per_head=H, per_dim_scale=True)
    x, ones = _normal(9, B, T, D), jnp.ones((B, T), jnp.int32)
    variables = _unboxed(jax.jit(learned.init)(jax.random.key(0), x, ones, _positions(B, T)))
    theirs = {"params": {name: value for name, value in variables["params"].items() if name != "per_dim_scale"}}
    np.testing.assert_allclose(
        _apply(learned, variables, x, ones, _positions(B, T))[0],
        _apply(plain, theirs, x, ones, _positions(B, T))[0],
        **FLOAT32,
    )


@pytest.mark.parametrize("window", [1, 5, T])
def test_chunks_are_rows_of_their_own(window):
    layer, variables = _layer(window=window, chunked=True)
    x, ones = _normal(7, B, T, D), jnp.ones((B, T), jnp.int32)
    found, _ = _apply(layer, variables, x, ones, _positions(B, T))
    apply_to_part = jax.jit(layer.clone(window=None, chunked=False).apply)
    for start in range(0, T, window):
        part = x[:, start : start + window]
        one = ones[:, : part.shape[1]]
        alone, _ = apply_to_part(variables, part, one, one)
        np.testing.assert_allclose(found[:, start : start + window], alone, **FLOAT32)
    if window == 5:  # it sees less than a sliding window does
        sliding, _ = _apply(layer.clone(chunked=False), variables, x, ones, _positions(B, T))
        assert np.abs(found - sliding).max() > 1e-2


def test_temperature_by_the_formula():
    layer, variables = _layer(temperature_growth=0.3, temperature_length=4)
    x, at = _normal(7, B, 1, D), jnp.array([[2], [11]])
    cache = layer.init_cache(B, T, jnp.float32)._replace(key=_normal(8, B, N, H, T), value=_normal(9, B, N, T, H))
    found, _ = _apply(layer, variables, x, jnp.ones_like(at), at, cache)
    # Position 2 is before the first step, position 11 at the third one.
    for row, factor in enumerate((1.0, 1 + 0.3 * np.log(1 + 3))):
        query = {**variables["params"], "query": variables["params"]["query"] * factor}
        plain = layer.clone(temperature_growth=None)
        expected, _ = _apply(plain, {"params": query}, x, jnp.ones_like(at), at, cache)
        np.testing.assert_allclose(found[row], expected[row], **FLOAT32)


@pytest.mark.parametrize("fields", [{}, {"window": 3, "segmented": False}], ids=str)
def test_chunks_without_a_size_or_segments_are_refused(fields):
    with pytest.raises(ConfigError, match="chunked=true requires"):
        _layer(chunked=True, **fields)


def test_a_joint_norm_of_queries_and_keys_without_a_norm_is_refused():
    with pytest.raises(ConfigError, match="qk_norm_joint=true has no effect without `qk_norm`"):
        _layer(qk_norm_joint=True)


def test_a_window_without_order_is_refused():
    with pytest.raises(ConfigError, match="window=3"):
        _layer(window=3, causal=False)


@pytest.mark.parametrize("causal", [True, False])
def test_values_of_another_size_against_numpy(causal):
    """Forward and gradients, with GQA: queries and keys of 6 features a head, values of 10."""
    layer, variables = _layer(num_kv_heads=2, value_dims_per_head=10, causal=causal)
    x, ones = _normal(6, B, T, D), jnp.ones((B, T), jnp.int32)

    def reference(params, x):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in ("query", "key", "value"))
        k, v = (jnp.repeat(heads, 2, axis=2) for heads in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
        logits = jnp.where(jnp.tril(jnp.ones((T, T), bool)) | (not causal), logits, -jnp.inf)
        context = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
        return jnp.sum(jnp.sin(jnp.einsum("btnh,nhd->btd", context, params["post"])))

    def ours(params, x):
        return jnp.sum(jnp.sin(layer.apply({"params": params}, x, ones, _positions(B, T))[0]))

    assert variables["params"]["value"].shape == (D, 2, 10) and variables["params"]["post"].shape == (N, 10, D)
    (value, found), (expected_value, expected) = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(variables["params"], x) for f in (ours, reference)
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for ours_grad, reference_grad in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours_grad, reference_grad, **FLOAT32)
