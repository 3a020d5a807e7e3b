"""Attention in plain JAX, compiled by XLA: on every platform, with every option."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.layers.activations import identity, soft_cap
from paxcli.layers.attention.backend import AttentionBackend, Context, Demand, Operands
from paxcli.layers.attention.causal import causal_attention, is_visible
from paxcli.layers.scopes import ATTENTION_CORE


@jax.named_scope(ATTENTION_CORE)
def dot_product_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S Hv"],
    mask: Bool[jax.Array, "B T S"],
    logit_cap: float | None = None,
    bias: Float[jax.Array, "... N T S"] | None = None,
    sinks: Float[jax.Array, " N"] | None = None,
    drop: Callable[[jax.Array], jax.Array] = identity,
) -> Context:
    """Attention of scaled queries; query head n reads key/value head n // (N / K). The softmax is float32.

    The bias is added to the capped logits. A sink is one more logit of a head, of a key without value. `drop` is the
    dropout of the probabilities.
    """
    batch, heads, length, dims = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], length, dims)
    logits = jnp.einsum("bkgth,bksh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, logit_cap)
    if bias is not None:
        logits = logits + bias.reshape(*bias.shape[:-3], *logits.shape[1:3], *bias.shape[-2:])
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        more = sinks.astype(logits.dtype).reshape(*logits.shape[1:3], 1, 1)  # cast first: rows' gradients add up here
        logits = jnp.concatenate([logits, jnp.broadcast_to(more, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[2]].astype(value.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", drop(weights), value).reshape(batch, heads, length, value.shape[-1])


class XlaAttention(AttentionBackend):
    """Blockwise causal attention where there are neither bias, sinks nor dropout, else one masked softmax."""

    name = "xla"

    def attend(self, operands: Operands, demand: Demand) -> Context:
        query, key, value, segment_ids, bias, sinks = operands
        batch, heads, length, _ = query.shape
        if segment_ids is None:
            segment_ids = jnp.ones((batch, length), jnp.int32)
        if demand.causal and bias is None and sinks is None and demand.drop is identity:
            groups = heads // key.shape[1]
            key, value = (jnp.repeat(part, groups, axis=1) if groups > 1 else part for part in (key, value))
            return causal_attention(query, key, value, segment_ids, demand.logit_cap, demand.window)
        visible = segment_ids[:, :, None] == segment_ids[:, None, :]
        if demand.causal:
            visible = visible & is_visible(distances(length), demand.window)
        return dot_product_attention(query, key, value, visible, demand.logit_cap, bias, sinks, demand.drop)


def distances(length: int) -> Int[jax.Array, "T T"]:
    """Query position minus key position, in the row; inside a packed segment it is the same."""
    return jnp.arange(length)[:, None] - jnp.arange(length)
