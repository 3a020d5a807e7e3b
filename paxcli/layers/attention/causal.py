"""Exact causal attention in blocks: skips blocks that the mask hides, and saves no [T, T] array for the backward pass.

The idea is FlashAttention's (Dao et al., 2022), in plain JAX: a query block reads keys up to its own end only, and the
backward pass recomputes the probabilities from the saved log-sum-exp, one key block at a time and transposed, because
XLA runs these matmuls at full speed on a CPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.layers.activations import soft_cap
from paxcli.layers.scopes import ATTENTION_CORE

_MASKED = -1e30  # finite, so that a row with only masked keys has a maximum too
_LEAST_BLOCK = 64
_MOST_BLOCKS = 4  # more blocks skip little more, and cost more calls
_WINDOWED_BLOCKS = (32, 16, 8)  # with a window they skip more, as long as a block is at least as long as the window


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def causal_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B N T H"],
    value: Float[jax.Array, "B N T Hv"],
    segment_ids: Int[jax.Array, "B T"],
    logit_cap: float | None = None,
    window: int | None = None,
) -> Float[jax.Array, "B N T Hv"]:
    """Causal attention of scaled queries within segments, with a float32 softmax.

    With a `window` (sliding-window attention), a query sees only the last `window` keys, its own included.
    """
    return _forward(query, key, value, segment_ids, logit_cap, window)[0]


@jax.named_scope(ATTENTION_CORE)
def _forward(query, key, value, segment_ids, logit_cap, window):
    blocks = []
    for start, end in _blocks(query.shape[2], window):
        seen = slice(0 if window is None else max(0, start + 1 - window), end)
        logits = soft_cap(_rows_by_rows(query[:, :, start:end], key[:, :, seen]), logit_cap)
        logits = jnp.where(_visible(segment_ids, slice(start, end), seen, window), logits, _MASKED)
        maximum = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - maximum)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        context = _rows_by_columns(weights.astype(value.dtype), value[:, :, seen]) / total
        blocks.append((context.astype(value.dtype), (maximum + jnp.log(total))[..., 0]))
    context, log_totals = (jnp.concatenate(parts, axis=2) for parts in zip(*blocks, strict=True))
    return context, (query, key, value, segment_ids, context, log_totals)


@jax.named_scope(ATTENTION_CORE)
def _backward(logit_cap, window, residuals, context_grad):
    query, key, value, segment_ids, context, log_totals = residuals
    length = query.shape[2]
    delta = jnp.sum(context_grad.astype(jnp.float32) * context, axis=-1)
    blocks, query_grads, key_grads, value_grads = _blocks(length, window), [], [], []
    for start, end in blocks:
        later = slice(start, length if window is None else min(length, end - 1 + window))
        later_query, later_grad = query[:, :, later], context_grad[:, :, later]
        # Everything here is transposed: rows are keys, columns are the queries that may see them.
        logits = soft_cap(_rows_by_rows(key[:, :, start:end], later_query), logit_cap)
        visible = jnp.swapaxes(_visible(segment_ids, later, slice(start, end), window), 2, 3)
        weights = jnp.exp(jnp.where(visible, logits, _MASKED) - log_totals[:, :, None, later])
        logit_grads = weights * (_rows_by_rows(value[:, :, start:end], later_grad) - delta[:, :, None, later])
        if logit_cap is not None:
            logit_grads = logit_grads * (1 - jnp.square(logits / logit_cap))
        logit_grads = logit_grads.astype(query.dtype)
        value_grads.append(_rows_by_columns(weights.astype(query.dtype), later_grad))
        key_grads.append(_rows_by_columns(logit_grads, later_query))
        query_grads.append(_rows_by_columns(jnp.swapaxes(key[:, :, start:end], 2, 3), logit_grads))
    starts = [start for start, _ in blocks]
    query_grad = jnp.swapaxes(_sum_of_columns(query_grads, starts, length), 2, 3).astype(query.dtype)
    key_grad, value_grad = (jnp.concatenate(g, axis=2).astype(query.dtype) for g in (key_grads, value_grads))
    return query_grad, key_grad, value_grad, None


causal_attention.defvjp(_forward, _backward)


def _sum_of_columns(parts: list[jax.Array], starts: list[int], length: int) -> jax.Array:
    """The sum [B, N, H, length] of arrays [B, N, H, S], each added from its own start on; the first starts at 0.

    In place: on a CPU, XLA would fuse a sum of padded arrays into each of its readers, and compute it several times.
    """
    total = jnp.pad(parts[0], ((0, 0), (0, 0), (0, 0), (0, length - parts[0].shape[3])))
    for start, part in zip(starts[1:], parts[1:], strict=True):
        before = jax.lax.slice_in_dim(total, start, start + part.shape[3], axis=3)
        total = jax.lax.dynamic_update_slice_in_dim(total, before + part, start, axis=3)
    return total


def _blocks(length: int, window: int | None) -> list[tuple[int, int]]:
    """Start and end of each block of a row."""
    least = {_MOST_BLOCKS: _LEAST_BLOCK, 2: _LEAST_BLOCK}
    if window is not None:
        least |= dict.fromkeys(_WINDOWED_BLOCKS, max(window, _LEAST_BLOCK))
    size = length // max((n for n, size in least.items() if length % n == 0 and length // n >= size), default=1)
    return [(start, start + size) for start in range(0, length, size)]


def _visible(segment_ids: jax.Array, queries: slice, keys: slice, window: int | None) -> jax.Array:
    """The mask [B, 1, queries, keys]: same segment, not later, not before the window."""
    distance = jnp.arange(queries.start, queries.stop)[:, None] - jnp.arange(keys.start, keys.stop)
    return ((segment_ids[:, queries, None] == segment_ids[:, None, keys]) & is_visible(distance, window))[:, None]


def is_visible(distance: Int[jax.Array, "... T S"], window: int | jax.Array | None) -> Bool[jax.Array, "... T S"]:
    """Whether a causal query sees the key `distance` positions before it."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _rows_by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """[B, N, S, H] and [B, N, T, H] to [B, N, S, T], float32."""
    return jnp.einsum("bnsh,bnth->bnst", a, b, preferred_element_type=jnp.float32)


def _rows_by_columns(a: jax.Array, b: jax.Array) -> jax.Array:
    """[B, N, S, T] and [B, N, T, H] to [B, N, S, H], float32."""
    return jnp.einsum("bnst,bnth->bnsh", a, b, preferred_element_type=jnp.float32)
