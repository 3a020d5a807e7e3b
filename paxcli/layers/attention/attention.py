"""Self-attention: GQA and multi-query heads, sliding windows, soft caps, biases, packed segments, and a KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import DropoutRate, PositiveFloat, PositiveInt, SafeOnResume, Tokens
from paxcli.errors import ConfigError
from paxcli.layers.activations import dropout
from paxcli.layers.attention.backend import HEADS, Demand, Operands
from paxcli.layers.attention.kernels import XLA, Kernel, choose_on_mesh
from paxcli.layers.attention.relative_bias import RelativeBias
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.xla import distances, dot_product_attention, is_visible
from paxcli.layers.base import HiddenStates, Ids, SelfAttention, Visibility
from paxcli.layers.flops import Flops, visible_pairs
from paxcli.layers.fp8 import Precision, product
from paxcli.layers.init import Init, Xavier
from paxcli.layers.lora import Matrix
from paxcli.layers.remat import CONTEXT, save_as
from paxcli.layers.rms_norm import RmsNorm
from paxcli.layers.scopes import ATTENTION_PROJECTION
from paxcli.layers.shared_weights import add_bias, multiply_by_scale
from paxcli.mesh.sharding import constrain, current_device


class KVCache(NamedTuple):
    """Keys [B, K, H, S], which a CPU multiplies with few queries faster so, and values [B, K, S, Hv] of S positions."""

    key: jax.Array
    value: jax.Array

    @property
    def in_rows(self) -> tuple[Float[jax.Array, "B K S H"], Float[jax.Array, "B K S Hv"]]:
        """Keys and values, both in rows of one position."""
        return jnp.swapaxes(self.key, 2, 3), self.value


class Attention(SelfAttention):
    """Multi-head self-attention (Vaswani et al., 2017), GQA (grouped-query attention: Ainslie et al., 2023) if K < N.

    With K = 1 it is multi-query attention (Shazeer, 2019).

    Pax: `praxis.layers.DotProductAttention` with `combine_qkv`, and `MultiQueryDotProductAttention` when grouped.

    Attributes:
      model_dims: D.
      num_heads: N.
      dims_per_head: H, the head size of queries and keys.
      num_kv_heads: K, a divisor of N; None = N.
      value_dims_per_head: Hv, the head size of values; None = H. On GPUs, only Hopper's kernel takes another.
      use_bias: Whether the projections have biases.
      output_bias: Whether the output projection has one; None = as `use_bias`.
      query_scale: What queries are multiplied by; None = 1 / sqrt(H). The initial query weights are scaled inversely,
        so that with 1, as in T5, they carry the 1 / sqrt(H) themselves.
      per_dim_scale: Whether queries are also multiplied by a learned `softplus(s) / ln 2` per feature, initially 1.
      qk_norm: Template of a norm of each head's queries and keys (QK-norm), such as `RmsNorm.partial()`; None = off.
      qk_norm_joint: Whether it is over the features of all heads together (OLMo et al., 2024).
      logit_cap: `cap * tanh(logit / cap)` before masking (soft cap); None = off.
      causal: Whether a position sees only itself and earlier ones.
      window: Sliding window: number of positions seen, the query's own included (Beltagy et al., 2020); None = all.
      chunked: Whether `window` is the size of chunks instead: segments are divided into chunks of so many positions,
        and a position sees its own chunk only (chunked attention, Llama 4).
      segmented: Whether a position sees only its own segment (packed document). False: also the documents before it in
        its row, as GPT-2 was trained; requires `causal`, and saves kernels the mask. If no layer is segmented, a
        language model counts positions from the start of the row.
      bidirectional_prefix: Whether positions also see the prefix of their segment where it is ahead (prefix-LM: Raffel
        et al., 2020; Pax: `LMModelType.PREFIX`). Tokens of the prefix have negative segment ids. Runs on `xla`.
      relative_bias: Template of a learned bias by distance, such as `RelativeBias.partial()`; None = off.
      rotary: Template of RoPE for queries and keys, such as `Rotary.partial()`; None = off (NoPE).
      kernel: Backend in training and evaluation: `splash` (TPU), `cudnn` (GPU), or plain `xla`; `auto` uses the kernel
        of the mesh's devices where it can serve, else `xla`, and logs which. Decoding runs on `xla`.
      precision: `fp8` computes the projections in 8 bits in training; None = in the dtype of the activations.
      params_init: Initializer of the projections.
      combine_qkv: Whether query, key and value, where they have one shape, count as one weight for `PraxisXavier` and
        in the statistics of optimizers (Pax: `combine_qkv`). They are separate parameters all the same.
      sinks: Whether each head has a learned logit of a key without value, so that it can attend to nothing (attention
        sinks: Xiao et al., 2023). On GPUs and CPUs this saves the logits of each head, [T, T], for the backward pass.
      temperature_growth: Queries are multiplied by `1 + growth * ln(1 + floor((position + 1) / temperature_length))`,
        so that attention stays sharp in long rows (Nakanishi, 2025; Llama 4 without RoPE); None = off.
      temperature_length: Positions between two steps of this factor.
      atten_dropout_prob: Share of the attention probabilities that training drops. Needs `xla` in training, which then
        stores the probabilities of each head, [T, T]; `auto` uses it.
    """

    model_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    use_bias: bool = False
    output_bias: bool | None = None
    query_scale: PositiveFloat | None = None
    per_dim_scale: bool = False
    qk_norm: functools.partial[RmsNorm] | None = None
    qk_norm_joint: bool = False
    logit_cap: PositiveFloat | None = None
    causal: bool = True
    window: Tokens | None = None
    segmented: bool = True
    relative_bias: functools.partial[RelativeBias] | None = None
    rotary: functools.partial[Rotary] | None = None
    kernel: SafeOnResume[Kernel] = "auto"
    precision: Precision | None = None
    params_init: Init = Xavier()
    value_dims_per_head: PositiveInt | None = None
    combine_qkv: bool = True
    bidirectional_prefix: bool = False
    sinks: bool = False
    chunked: bool = False
    temperature_growth: PositiveFloat | None = None
    temperature_length: Tokens = 8192
    atten_dropout_prob: DropoutRate = 0.0

    def setup(self) -> None:
        if self.window is not None and not self.causal:
            hint = "Set `window` to null, or `causal` to true."
            raise ConfigError(f"window={self.window}: a sliding window requires causal attention.", hint)
        if self.bidirectional_prefix and not (self.causal and self.segmented and self.window is None):
            hint = "Set `bidirectional_prefix` to false, or change these three."
            raise ConfigError("bidirectional_prefix=true requires `causal` and `segmented`, and no `window`.", hint)
        if self.chunked and (self.window is None or not self.segmented):
            hint = "Set both, or `chunked` to false."
            raise ConfigError("chunked=true requires `window`, the size of chunks, and `segmented`.", hint)
        if not (self.segmented or self.causal):
            cause = "attention that is not causal would also see the padding of its row"
            raise ConfigError(f"segmented=false: {cause}.", "Set `segmented` or `causal` to true.")
        dims = self.dims_per_head
        start = 1.0 if self.query_scale is None else dims**-0.5 / self.query_scale
        self.query, self.query_bias = self._projection("query", self.num_heads, "heads", start)
        self.key, self.key_bias = self._projection("key", self._kv_heads, "kv_heads")
        self.value, self.value_bias = self._projection("value", self._kv_heads, "kv_heads", dims=self._value_dims)
        shape, axes = (self.num_heads, self._value_dims, self.model_dims), ("heads", "head_dim", "embed")
        self.post = self.weight("post", self.params_init, shape, axes, contracts=(0, 1), produces=(2,), factored=True)
        self.query_product, self.key_product = product(self.precision), product(self.precision)
        self.value_product, self.post_product = product(self.precision), product(self.precision)
        has_bias = self.use_bias if self.output_bias is None else self.output_bias
        self.post_bias = self.zero_weight("post_bias", (self.model_dims,), ("norm",)) if has_bias else None
        self.sink_logits = self.zero_weight("sinks", (self.num_heads,), ("heads",)) if self.sinks else None
        if self.per_dim_scale:
            self.scale = self.zero_weight("per_dim_scale", (dims,), ("norm",))
        if self.qk_norm is not None:
            query_heads, key_heads = (self.num_heads, self._kv_heads) if self.qk_norm_joint else (1, 1)
            self.query_norm, self.key_norm = self.qk_norm(dims=query_heads * dims), self.qk_norm(dims=key_heads * dims)
        elif self.qk_norm_joint:
            raise ConfigError("qk_norm_joint=true has no effect without `qk_norm`.", "Set both, or neither.")
        if self.relative_bias is not None:
            kind = {"num_heads": self.num_heads, "bidirectional": not self.causal}
            self._distance_bias = self.relative_bias(name="relative_bias", **kind)
        if self.rotary is not None:
            self.rotate = self.rotary(dims_per_head=dims)

    def __call__(
        self, x: HiddenStates, segment_ids: Ids, segment_pos: Ids, cache: KVCache | None = None
    ) -> tuple[HiddenStates, KVCache | None]:
        """Attends within segments. With a cache, `segment_pos` is where to write and the last position visible."""
        query, key, value = self._queries(x), *self._keys_and_values(x)
        chunk = self.window if self.chunked else None
        if self.rotary is not None:
            query, key = self.rotate(query, segment_pos), self.rotate(key, segment_pos)
        if self.temperature_growth is not None:
            steps = jnp.log1p((segment_pos + 1) // self.temperature_length)
            query = (query * (1 + self.temperature_growth * steps)[:, None, :, None]).astype(query.dtype)
        query, key, value = map(shard_heads, ("query", "key", "value"), (query, key, value))
        if cache is not None:
            start = segment_pos[:, 0]
            keys = write_at(cache.key, jnp.swapaxes(key, 2, 3), start, axis=3)
            cache = KVCache(keys, write_at(cache.value, value, start))
            distance = segment_pos[:, :, None] - jnp.arange(cache.value.shape[2])
            visible = is_visible(distance, self.window if chunk is None else (segment_pos % chunk + 1)[..., None])
            if self.bidirectional_prefix:
                in_prefix = jnp.arange(cache.value.shape[2]) < jnp.sum(segment_ids < 0, axis=1)[:, None]
                visible = visible | in_prefix[:, None]
            return self._attend_to_visible(query, cache.in_rows, visible, self._bias(distance)), cache
        bias = self._bias(distances(x.shape[1]))
        if self.bidirectional_prefix:
            same = jnp.abs(segment_ids)[:, :, None] == jnp.abs(segment_ids)[:, None]
            visible = same & (is_visible(distances(x.shape[1]), None) | (segment_ids < 0)[:, None])
            return self._attend_to_visible(query, (key, value), visible, bias), None
        demanded = self.named_fields("causal", "logit_cap", "window", "sinks")
        if chunk is not None and x.shape[1] <= chunk:
            demanded["window"] = None
        drop = dropout(self, self.atten_dropout_prob)
        demand = Demand.of(query, value, biased=bias is not None, drop=drop, **demanded)
        # Initialization runs on one short row, for shapes only.
        backend = XLA if self.is_initializing() else choose_on_mesh(self.kernel, demand)
        segments = segment_ids if self.segmented else None
        if chunk is not None and x.shape[1] > chunk:  # chunks are segments of their own
            segments = segment_ids * (x.shape[1] // chunk + 1) + segment_pos // chunk
        context = backend.attend(Operands(query, key, value, segments, bias, self.sink_logits), demand)
        return self._project_output(context, is_named=backend.names_context), None

    @property
    def visibility(self) -> Visibility:
        return "prefix" if self.bidirectional_prefix else "segment" if self.segmented else "row"

    def matmul_flops(self, *shape: int) -> Flops | None:
        batch, length = shape
        tokens, pairs = batch * length, batch * visible_pairs(length, self.causal, self.window, self.chunked)
        return self._flops(tokens, tokens, pairs)

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> KVCache:
        if not self.causal:
            hint = "Decode with a model whose attention is causal."
            raise ConfigError("Attention that is not causal cannot decode: earlier tokens would see later ones.", hint)
        lead = (batch_size, self._kv_heads)
        keys, values = (*lead, self.dims_per_head, length), (*lead, length, self._value_dims)
        return KVCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))

    def _flops(self, queries: int, keys: int, pairs: int | float) -> Flops:
        """FLOPs of the four projections of so many positions, and of attention between so many pairs of them."""
        heads, dims = queries * self.num_heads + keys * self._kv_heads, self.dims_per_head + self._value_dims
        return Flops(weights=2 * heads * self.model_dims * dims, attention=2 * pairs * self.num_heads * dims)

    def _attend_to_visible(self, query: jax.Array, rows: tuple, visible: jax.Array, bias: Any = None) -> HiddenStates:
        """The output of attention to `rows`, keys and values, where `visible` [B, T, S] is true."""
        key, value = rows
        drop = dropout(self, self.atten_dropout_prob)
        context = dot_product_attention(query, key, value, visible, self.logit_cap, bias, self.sink_logits, drop)
        return self._project_output(context)

    def _bias(self, distance: Int[jax.Array, "... T S"]) -> Float[jax.Array, "... N T S"] | None:
        """The learned bias for query position minus key position, if there is one."""
        return None if self.relative_bias is None else self._distance_bias(distance)

    @property
    def _kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def _value_dims(self) -> int:
        return self.value_dims_per_head or self.dims_per_head

    def _projection(
        self, name: str, heads: int, axis: str, start: float = 1.0, dims: int | None = None
    ) -> tuple[Matrix, jax.Array | None]:
        """A weight [D, N, H], its initial values times `start`, and its bias [N, H], if there is one."""
        dims = dims or self.dims_per_head
        one_shape = self._kv_heads == self.num_heads and self._value_dims == self.dims_per_head
        fused, group, bias_group = (3, "qkv", "qkv_bias") if one_shape and self.combine_qkv else (1, None, None)
        shape, axes = (self.model_dims, heads, dims), ("embed", axis, "head_dim")
        matmul: dict[str, Any] = dict(contracts=(0,), produces=(1, 2), factored=True)
        w = self.weight(name, self.params_init, shape, axes, fused=fused, group=group, factor=start, **matmul)
        return w, self.zero_weight(f"{name}_bias", shape[1:], axes[1:], group=bias_group) if self.use_bias else None

    @jax.named_scope(ATTENTION_PROJECTION)
    def _queries(self, x: jax.Array) -> jax.Array:
        """Scaled queries [B, N, T, H] of [B, T, D]."""
        query = _project(self.query_product, x, self.query, self.query_bias)
        if self.qk_norm is not None:
            query = self._norm_heads(self.query_norm, query)
        scale = self.dims_per_head**-0.5 if self.query_scale is None else self.query_scale
        if self.per_dim_scale:
            return multiply_by_scale(query, (jax.nn.softplus(self.scale) * (scale / jnp.log(2.0))).astype(query.dtype))
        return query * scale

    @jax.named_scope(ATTENTION_PROJECTION)
    def _keys_and_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, K, S, H] and values [B, K, S, Hv] of [B, S, D]."""
        key = _project(self.key_product, x, self.key, self.key_bias)
        value = _project(self.value_product, x, self.value, self.value_bias)
        return key if self.qk_norm is None else self._norm_heads(self.key_norm, key), value

    def _norm_heads(self, norm: nn.Module, heads: Float[jax.Array, "B N T H"]) -> Float[jax.Array, "B N T H"]:
        if not self.qk_norm_joint:
            return norm(heads)
        rows = jnp.swapaxes(heads, 1, 2)
        return jnp.swapaxes(norm(rows.reshape(*rows.shape[:2], -1)).reshape(rows.shape), 1, 2)

    def _project_output(self, context: jax.Array, is_named: bool = False) -> jax.Array:
        return project_output(self.post_product, context, self.post, self.post_bias, is_named)


def shard_heads(name: str, heads: Float[jax.Array, "B N T H"]) -> Float[jax.Array, "B N T H"]:
    """Queries, keys or values with their sharding constraint and their name for remat policies."""
    return save_as(name, constrain(heads, *HEADS))


@jax.named_scope(ATTENTION_PROJECTION)
def project_output(
    product: Callable[..., jax.Array], context: jax.Array, w: Matrix, bias: jax.Array | None, is_named: bool
) -> jax.Array:
    """The output projection, [B, N, T, Hv] to [B, T, D], of a context that a backend may have named already."""
    context = constrain(context, *HEADS) if is_named else shard_heads(CONTEXT, context)
    # JAX contracts axes in alphabetical order: with "n" and "h", decoding would transpose the weight for each token.
    y = add_bias(product("bath,ahd->btd" if context.shape[2] == 1 else "bnth,nhd->btd", context, w), bias)
    return save_as("out_proj", constrain(y, "activation_batch", "activation_length", "activation_embed"))


def _project(product: Callable[..., jax.Array], x: jax.Array, w: Matrix, bias: jax.Array | None) -> jax.Array:
    """[B, T, D] and [D, N, H] to [B, N, T, H]."""
    y = product("btd,dnh->btnh", x, w)
    if bias is not None:
        is_gpu = current_device().platform == "gpu"  # where cuBLAS adds biases that are vectors
        y = add_bias(y.reshape(*y.shape[:2], -1), bias.reshape(-1)).reshape(y.shape) if is_gpu else add_bias(y, bias)
    return jnp.swapaxes(y, 1, 2)


def write_at(
    old: Float[jax.Array, "B K _ _"], new: Float[jax.Array, "B K _ _"], start: Int[jax.Array, " B"], axis: int = 2
) -> Float[jax.Array, "B K _ _"]:
    """An array of a decode cache with `new` written at the positions from `start` on, row by row.

    Args:
      old: The array.
      new: What to write at T positions.
      start: The first position of each row.
      axis: The axis of positions.
    """

    def write_row(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis - 1)

    def write_one(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        at = (0, *(slice(None),) * (axis - 1), jnp.repeat(start, 2))
        return old.at[at].set(jnp.squeeze(new[0], axis - 1).astype(old.dtype))

    write_rows = jax.vmap(write_row)
    if len(start) == new.shape[axis] == 1:
        # On a CPU, XLA runs a dynamic-update-slice once for each reader, on copies; a scatter of two positions once.
        return jax.lax.platform_dependent(old, new, start, cpu=write_one, default=write_rows)
    return write_rows(old, new, start)
