"""Self-attention with grouped key/value heads, caps, biases, packing masks and a cache for decoding."""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.layers.base import Layer
from paxcli.layers.caps import soft_cap
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import save_as
from paxcli.mesh.sharding import constrain

_HEADS = ("activation_batch", "activation_length", "activation_heads", None)


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, [B, S, K, H] each."""

    key: jax.Array
    value: jax.Array


def attention_mask(
    query_segments: Int[jax.Array, "B T"],
    query_positions: Int[jax.Array, "B T"],
    key_segments: Int[jax.Array, "B S"],
    key_positions: Int[jax.Array, "B S"],
    causal: bool,
) -> Bool[jax.Array, "B T S"]:
    """True where a query may see a key: in the same segment and, if `causal`, not after it."""
    visible = query_segments[:, :, None] == key_segments[:, None, :]
    return visible & (query_positions[:, :, None] >= key_positions[:, None, :]) if causal else visible


def dot_product_attention(
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K H"],
    mask: Bool[jax.Array, "B T S"],
    logit_cap: float | None = None,
) -> Float[jax.Array, "B T N H"]:
    """Attention of scaled queries; head n reads key/value head n // (N / K). The softmax is float32."""
    batch, length, heads, dims = query.shape
    grouped = query.reshape(batch, length, key.shape[2], heads // key.shape[2], dims)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, logit_cap)
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    context = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    return context.reshape(batch, length, heads, dims)


class Attention(Layer):
    """Multi-head self-attention (Vaswani et al., 2017; grouped: Ainslie et al., 2023).

    Pax: `praxis.layers.DotProductAttention` with `combine_qkv`, and `MultiQueryDotProductAttention` when grouped.

    Attributes:
      model_dims: D.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K, a divisor of N; None = N.
      use_bias: Whether the projections have biases.
      per_dim_scale: Whether queries are scaled by a learned `softplus(s) / (ln 2 * sqrt(H))` for each feature, which
        starts at the fixed 1 / sqrt(H).
      logit_cap: `cap * tanh(logit / cap)` before masking; None = off.
      causal: Whether a position sees only itself and earlier ones.
      rotary: Template of a rotation of queries and keys, such as `Rotary.partial()`; None = off.
      params_init: How the projections start.
    """

    model_dims: int
    num_heads: int
    dims_per_head: int
    num_kv_heads: int | None = None
    use_bias: bool = False
    per_dim_scale: bool = False
    logit_cap: float | None = None
    causal: bool = True
    rotary: functools.partial | None = None
    params_init: Init = Xavier()

    def setup(self) -> None:
        model, heads, dims = self.model_dims, self.num_heads, self.dims_per_head
        kv_heads = self.num_kv_heads or heads
        project = self.params_init.weight((0,), (-2, -1))
        if kv_heads == heads:
            self.qkv = self.weight("qkv", project, (model, 3, heads, dims), ("embed", None, "heads", "head_dim"))
        else:
            self.query = self.weight("query", project, (model, heads, dims), ("embed", "heads", "head_dim"))
            self.kv = self.weight("kv", project, (model, 2, kv_heads, dims), ("embed", None, "kv_heads", "head_dim"))
        self.post = self.weight(
            "post", self.params_init.weight((0, 1), (2,)), (heads, dims, model), ("heads", "head_dim", "embed")
        )
        if self.use_bias:
            zeros = nn.initializers.zeros
            self.query_bias = self.weight("query_bias", zeros, (heads, dims), ("heads", "head_dim"))
            self.kv_bias = self.weight("kv_bias", zeros, (2, kv_heads, dims), (None, "kv_heads", "head_dim"))
            self.post_bias = self.weight("post_bias", zeros, (model,), ("norm",))
        if self.per_dim_scale:
            self.scale = self.weight("per_dim_scale", nn.initializers.zeros, (dims,), ("norm",))
        if self.rotary is not None:
            self.rotate = self.rotary(dims_per_head=dims)

    def __call__(
        self,
        x: Float[jax.Array, "B T D"],
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
        cache: KVCache | None = None,
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        """Attends within segments. With a cache, `segment_pos` says where to write and how far each query sees."""
        query, key, value = self._project(x)
        query = self._scale(query)
        if self.rotary is not None:
            query, key = self.rotate(query, segment_pos), self.rotate(key, segment_pos)
        query, key, value = (save_as("qkv", constrain(part, *_HEADS)) for part in (query, key, value))
        if cache is None:
            mask = attention_mask(segment_ids, segment_pos, segment_ids, segment_pos, self.causal)
        else:
            cache = _write(cache, key, value, segment_pos[:, 0])
            key, value = cache
            slots = jnp.broadcast_to(jnp.arange(key.shape[1]), key.shape[:2])
            mask = segment_pos[:, :, None] >= slots[:, None, :]
        context = dot_product_attention(query, key, value, mask, self.logit_cap)
        context = save_as("context", constrain(context, *_HEADS))
        y = jnp.einsum("btnh,nhd->btd", context, self.post)
        y = y + self.post_bias if self.use_bias else y
        return save_as("out_proj", constrain(y, "activation_batch", "activation_length", "activation_embed")), cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if (self.num_kv_heads or self.num_heads) == self.num_heads:
            query, key, value = jnp.moveaxis(jnp.einsum("btd,dcnh->btcnh", x, self.qkv), 2, 0)
        else:
            query = jnp.einsum("btd,dnh->btnh", x, self.query)
            key, value = jnp.moveaxis(jnp.einsum("btd,dckh->btckh", x, self.kv), 2, 0)
        if self.use_bias:
            query, key, value = query + self.query_bias, key + self.kv_bias[0], value + self.kv_bias[1]
        return query, key, value

    def _scale(self, query: jax.Array) -> jax.Array:
        scale = self.dims_per_head**-0.5
        if self.per_dim_scale:
            return query * (jax.nn.softplus(self.scale) * (scale / jnp.log(2.0))).astype(query.dtype)
        return query * scale


def _write(cache: KVCache, key: jax.Array, value: jax.Array, start: Int[jax.Array, " B"]) -> KVCache:
    """Puts new keys and values [B, T, K, H] into the slots from `start` on, row by row."""

    def write_row(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (at, 0, 0))

    return KVCache(*(jax.vmap(write_row)(old, new, start) for old, new in zip(cache, (key, value), strict=True)))
