"""Self-attention with grouped key/value heads, windows, caps, biases, packing masks and a cache for decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from paxcli.config.fields import PositiveFloat, PositiveInt, SafeOnResume, Tokens
from paxcli.errors import ConfigError
from paxcli.layers.activations import soft_cap
from paxcli.layers.attention.causal import causal_attention
from paxcli.layers.attention.kernels import HEADS, Kernel, fast_attention
from paxcli.layers.attention.relative_bias import RelativeBias
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.base import Layer
from paxcli.layers.fp8 import Precision, product
from paxcli.layers.init import Init, Initializer, Xavier
from paxcli.layers.remat import CONTEXT, save_as
from paxcli.layers.rms_norm import RmsNorm
from paxcli.layers.scopes import ATTENTION_CORE, ATTENTION_PROJECTION
from paxcli.mesh.sharding import constrain


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, [B, K, S, H] each."""

    key: jax.Array
    value: jax.Array


@jax.named_scope(ATTENTION_CORE)
def dot_product_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S H"],
    mask: Bool[jax.Array, "B T S"],
    logit_cap: float | None = None,
    bias: Float[jax.Array, "... N T S"] | None = None,
) -> Float[jax.Array, "B N T H"]:
    """Attention of scaled queries; head n reads key/value head n // (N / K). The softmax is float32.

    A bias is added to the capped logits.
    """
    batch, heads, length, dims = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], length, dims)
    logits = jnp.einsum("bkgth,bksh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    logits = soft_cap(logits, logit_cap)
    if bias is not None:
        logits = logits + bias.reshape(*bias.shape[:-3], *logits.shape[1:3], *bias.shape[-2:])
    logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bksh->bkgth", weights, value).reshape(query.shape)


class Attention(Layer):
    """Multi-head self-attention (Vaswani et al., 2017; grouped: Ainslie et al., 2023).

    Pax: `praxis.layers.DotProductAttention` with `combine_qkv`, and `MultiQueryDotProductAttention` when grouped.

    Attributes:
      model_dims: D.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K, a divisor of N; None = N.
      use_bias: Whether the projections have biases.
      query_scale: What queries are multiplied by; None = 1 / sqrt(H). Their weights start smaller the larger it is, so
        that with 1 they carry the root themselves, as in T5.
      per_dim_scale: Whether they are also multiplied by a learned `softplus(s) / ln 2` for each feature, which starts
        at 1.
      qk_norm: Template of a norm of each head's queries and keys, such as `RmsNorm.partial()`; None = off.
      logit_cap: `cap * tanh(logit / cap)` before masking; None = off.
      causal: Whether a position sees only itself and earlier ones.
      window: How many positions it sees of those, itself among them (Beltagy et al., 2020); None = all.
      segmented: Whether it sees its own segment only. False: the whole row before it, other documents too, as GPT-2 was
        trained; it takes causal attention, and saves kernels the mask.
      relative_bias: Template of a learned bias for the distance, such as `RelativeBias.partial()`; None = off.
      rotary: Template of a rotation of queries and keys, such as `Rotary.partial()`; None = off.
      kernel: What computes it in training and evaluation: `splash` (TPU), `cudnn` (GPU), or plain `xla`; `auto` takes
        the kernel of the mesh's devices where it can serve, and says so.
      precision: `fp8` computes the projections in 8 bits, in training; None = in the activations' type.
      params_init: How the projections start.
    """

    model_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    use_bias: bool = False
    query_scale: PositiveFloat | None = None
    per_dim_scale: bool = False
    qk_norm: functools.partial[RmsNorm] | None = None
    logit_cap: PositiveFloat | None = None
    causal: bool = True
    window: Tokens | None = None
    segmented: bool = True
    relative_bias: functools.partial[RelativeBias] | None = None
    rotary: functools.partial[Rotary] | None = None
    kernel: SafeOnResume[Kernel] = "auto"
    precision: Precision | None = None
    params_init: Init = Xavier()

    def setup(self) -> None:
        if self.window is not None and not self.causal:
            raise ConfigError(
                f"window={self.window}: a window needs causal attention.",
                "Set `window` to null, or `causal` to true.",
            )
        if not (self.segmented or self.causal):
            raise ConfigError(
                "segmented=false: attention that is not causal would see the padding of its row.",
                "Set `segmented` or `causal` to true.",
            )
        dims = self.dims_per_head
        start = 1.0 if self.query_scale is None else dims**-0.5 / self.query_scale
        self.query, self.query_bias = self._projection("query", self.num_heads, "heads", start)
        self.key, self.key_bias = self._projection("key", self._kv_heads, "kv_heads")
        self.value, self.value_bias = self._projection("value", self._kv_heads, "kv_heads")
        self.post = self.weight(
            "post",
            self.params_init,
            (self.num_heads, dims, self.model_dims),
            ("heads", "head_dim", "embed"),
            contracts=(0, 1),
            produces=(2,),
        )
        self.query_product, self.key_product = product(self.precision), product(self.precision)
        self.value_product, self.post_product = product(self.precision), product(self.precision)
        if self.use_bias:
            self.post_bias = self.weight("post_bias", nn.initializers.zeros, (self.model_dims,), ("norm",))
        if self.per_dim_scale:
            self.scale = self.weight("per_dim_scale", nn.initializers.zeros, (dims,), ("norm",))
        if self.qk_norm is not None:
            self.query_norm, self.key_norm = self.qk_norm(dims=dims), self.qk_norm(dims=dims)
        if self.relative_bias is not None:
            self._distance_bias = self.relative_bias(
                name="relative_bias", num_heads=self.num_heads, bidirectional=not self.causal
            )
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
        query, key, value = self._queries(x), *self._keys_and_values(x)
        if self.rotary is not None:
            query, key = self.rotate(query, segment_pos), self.rotate(key, segment_pos)
        query, key, value = map(laid_out, ("query", "key", "value"), (query, key, value))
        if cache is not None:
            cache = _write(cache, key, value, segment_pos[:, 0])
            distance = segment_pos[:, :, None] - jnp.arange(cache.key.shape[2])
            visible = self._reaches(distance)
            context = dot_product_attention(query, *cache, visible, self.logit_cap, self._bias(distance))
            return self._merged(context), cache
        fast = None
        if not self.is_initializing():  # on few and short rows, for their shapes only
            fast = self._on_kernel(query, key, value, segment_ids if self.segmented else None)
        if fast is not None:
            return self._merged(fast, is_named=True), None
        return self._merged(self._on_xla(query, key, value, segment_ids)), None

    def _on_kernel(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array | None:
        biased = self.relative_bias is not None
        how = (self.causal, self.logit_cap, self.window, biased)
        return fast_attention(self.kernel, query, key, value, segment_ids, *how)

    def _on_xla(self, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        if not self.segmented:
            segment_ids = jnp.ones_like(segment_ids)
        if self.causal and self.relative_bias is None:
            groups = self.num_heads // self._kv_heads
            key, value = (jnp.repeat(part, groups, axis=1) if groups > 1 else part for part in (key, value))
            return causal_attention(query, key, value, segment_ids, self.logit_cap, self.window)
        # Inside a segment, positions lie as far apart as they do in the row.
        distance = jnp.arange(query.shape[2])[:, None] - jnp.arange(query.shape[2])
        visible = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = visible & self._reaches(distance) if self.causal else visible
        return dot_product_attention(query, key, value, visible, self.logit_cap, self._bias(distance))

    def _reaches(self, distance: Int[jax.Array, "... T S"]) -> Bool[jax.Array, "... T S"]:
        """Whether a query sees a key that lies so many positions before it."""
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)

    def _bias(self, distance: Int[jax.Array, "... T S"]) -> Float[jax.Array, "... N T S"] | None:
        return None if self.relative_bias is None else self._distance_bias(distance)

    @property
    def _kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    def _projection(self, name: str, heads: int, axis: str, start: float = 1.0) -> tuple[jax.Array, jax.Array | None]:
        """A weight [D, N, H], which starts `start` times as large as others, and its bias [N, H], if there is one."""
        one_shape = self._kv_heads == self.num_heads
        w = self.weight(
            name,
            self.params_init if start == 1.0 else _Scaled(self.params_init, start),
            (self.model_dims, heads, self.dims_per_head),
            ("embed", axis, "head_dim"),
            contracts=(0,),
            produces=(1, 2),
            fused=3 if one_shape else 1,
            group="qkv" if one_shape else None,
        )
        if not self.use_bias:
            return w, None
        return w, self.weight(f"{name}_bias", nn.initializers.zeros, (heads, self.dims_per_head), (axis, "head_dim"))

    @jax.named_scope(ATTENTION_PROJECTION)
    def _queries(self, x: jax.Array) -> jax.Array:
        """Scaled queries [B, N, T, H] of [B, T, D]."""
        query = _project(self.query_product, x, self.query, self.query_bias)
        if self.qk_norm is not None:
            query = self.query_norm(query)
        scale = self.dims_per_head**-0.5 if self.query_scale is None else self.query_scale
        if self.per_dim_scale:
            return query * (jax.nn.softplus(self.scale) * (scale / jnp.log(2.0))).astype(query.dtype)
        return query * scale

    @jax.named_scope(ATTENTION_PROJECTION)
    def _keys_and_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both [B, K, S, H] of [B, S, D]."""
        key = _project(self.key_product, x, self.key, self.key_bias)
        value = _project(self.value_product, x, self.value, self.value_bias)
        return key if self.qk_norm is None else self.key_norm(key), value

    @jax.named_scope(ATTENTION_PROJECTION)
    def _merged(self, context: jax.Array, is_named: bool = False) -> jax.Array:
        """The output projection: [B, N, T, H] to [B, T, D]."""
        context = constrain(context, *HEADS)
        context = context if is_named else save_as(CONTEXT, context)
        y = self.post_product("bnth,nhd->btd", context, self.post)
        y = y + self.post_bias if self.use_bias else y
        return save_as("out_proj", constrain(y, "activation_batch", "activation_length", "activation_embed"))


def laid_out(name: str, heads: Float[jax.Array, "B N T H"]) -> Float[jax.Array, "B N T H"]:
    """Queries, keys or values where they belong, under their name for remat policies."""
    return save_as(name, constrain(heads, *HEADS))


@dataclasses.dataclass(frozen=True)
class _Scaled(Init):
    """`init` times `factor`."""

    init: Init
    factor: PositiveFloat

    def weight(self, fan_in: Sequence[int], fan_out: Sequence[int], fused: int = 1) -> Initializer:
        init = self.init.weight(fan_in, fan_out, fused)
        return lambda *args: self.factor * init(*args)


def _project(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[B, T, D] and [D, N, H] to [B, N, T, H]."""
    y = product("btd,dnh->btnh", x, w)
    return jnp.swapaxes(y if bias is None else y + bias, 1, 2)


def _write(cache: KVCache, key: jax.Array, value: jax.Array, start: Int[jax.Array, " B"]) -> KVCache:
    """Puts new keys and values [B, K, T, H] into the slots from `start` on, row by row."""

    def write_row(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, at, 0))

    return KVCache(*(jax.vmap(write_row)(old, new, start) for old, new in zip(cache, (key, value), strict=True)))
