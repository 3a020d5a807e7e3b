"""Multi-head latent attention (MLA): keys and values are expanded from a small latent, which alone is cached."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import template
from paxcli.config.fields import PositiveFloat, PositiveInt, SafeOnResume
from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import project_output, shard_heads, write_at
from paxcli.layers.attention.backend import Demand, Operands
from paxcli.layers.attention.kernels import XLA, Kernel, choose_on_mesh
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.xla import dot_product_attention, is_visible
from paxcli.layers.base import HiddenStates, Ids, SelfAttention, Visibility
from paxcli.layers.flops import Flops, matrix_flops, visible_pairs
from paxcli.layers.init import Init, Xavier
from paxcli.layers.rms_norm import RmsNorm
from paxcli.layers.scopes import ATTENTION_PROJECTION

# Of each position seen so far the latent and the rotated key, C = R + Hr features.
LatentCache = Float[jax.Array, "B 1 S C"]


class LatentAttention(SelfAttention):
    """Causal self-attention with keys and values from a latent (MLA: DeepSeek-AI, 2024, section 2.1).

    A token's latent, R features, is normed and expanded to the N heads' values and to all but Hr features of their
    keys. Those Hr features, which carry the positions (decoupled RoPE), are one key for all heads. Queries have the
    same two parts, H - Hr and Hr features. Decoding caches R + Hr features a token, and moves the expansion to queries
    and outputs, so that it attends to the cache as multi-query attention does.

    Attributes:
      model_dims: D.
      num_heads: N.
      dims_per_head: H, the head size of queries and keys, both parts together.
      num_kv_heads: None or N: each head has keys and values of its own.
      latent_dims: R.
      query_latent_dims: Features of a latent that queries are expanded from, too; None = from the D features.
      rotary_dims: Hr.
      value_dims_per_head: Hv, the head size of values; None = H - Hr.
      rotary: Template of RoPE.
      latent_norm: Template of the norms of latents.
      query_scale: What queries are multiplied by; None = 1 / sqrt(H).
      segmented: Whether a position sees only its own segment (packed document), as in `Attention`.
      kernel: Backend in training and evaluation, as in `Attention`.
      params_init: Initializer of the weights.
    """

    model_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    latent_dims: PositiveInt = 512
    query_latent_dims: PositiveInt | None = None
    rotary_dims: PositiveInt = 64
    value_dims_per_head: PositiveInt | None = None
    rotary: functools.partial[Rotary] = template(Rotary)
    latent_norm: functools.partial[RmsNorm] = template(RmsNorm)
    query_scale: PositiveFloat | None = None
    segmented: bool = True
    kernel: SafeOnResume[Kernel] = "auto"
    params_init: Init = Xavier()

    def setup(self) -> None:
        if self.num_kv_heads not in (None, self.num_heads):
            raise ConfigError("Latent attention has no shared key/value heads.", "Set `num_kv_heads` to null.")
        if self.rotary_dims >= self.dims_per_head:
            hint = "Lower `rotary_dims`."
            raise ConfigError(f"rotary_dims={self.rotary_dims} is not below dims_per_head={self.dims_per_head}.", hint)
        dims, latent = self.model_dims, self.latent_dims
        matrix = functools.partial(self.weight, init=self.params_init, contracts=(0,))
        down = functools.partial(matrix, axes=("embed", None), produces=(1,))
        up = functools.partial(matrix, axes=("embed", "heads", "head_dim"), produces=(1, 2))
        if self.query_latent_dims is not None:
            self.query_down = down("query_down", shape=(dims, self.query_latent_dims))
            self.query_norm = self.latent_norm(dims=self.query_latent_dims)
        self.query = up("query", shape=(self.query_latent_dims or dims, self.num_heads, self.dims_per_head))
        self.latent = down("latent", shape=(dims, latent))
        self.kv_norm = self.latent_norm(dims=latent)
        self.rotary_key = down("rotary_key", shape=(dims, self.rotary_dims))
        self.key = up("key", shape=(latent, self.num_heads, self._content_dims))
        self.value = up("value", shape=(latent, self.num_heads, self._value_dims))
        shape = (self.num_heads, self._value_dims, dims)
        self.post = matrix("post", shape=shape, axes=("heads", "head_dim", "embed"), contracts=(0, 1), produces=(2,))
        self.rotate = self.rotary(dims_per_head=self.rotary_dims)

    def __call__(
        self, x: HiddenStates, segment_ids: Ids, segment_pos: Ids, cache: LatentCache | None = None
    ) -> tuple[HiddenStates, LatentCache | None]:
        """Attends within segments. With a cache, `segment_pos` is where to write and the last position visible."""
        content, rotated = self._queries(x, segment_pos)
        latent, key = self._latents(x, segment_pos)
        if cache is not None:
            cache = write_at(cache, jnp.concatenate([latent, key], axis=-1), segment_pos[:, 0])
            visible = is_visible(segment_pos[:, :, None] - jnp.arange(cache.shape[2]), None)
            query = jnp.concatenate([jnp.einsum("bnth,rnh->bntr", content, self.key), rotated], axis=-1)
            attended = dot_product_attention(query, cache, cache[..., : self.latent_dims], visible)
            context = jnp.einsum("bntr,rnh->bnth", attended, self.value)
            return project_output(jnp.einsum, context, self.post, None, is_named=False), cache
        query = shard_heads("query", jnp.concatenate([content, rotated], axis=-1))
        keys = jnp.einsum("bksr,rnh->bnsh", latent, self.key), jnp.broadcast_to(key, rotated.shape)
        key = shard_heads("key", jnp.concatenate(keys, axis=-1))
        value = shard_heads("value", jnp.einsum("bksr,rnh->bnsh", latent, self.value))
        demand = Demand.of(query, value)
        # Initialization runs on one short row, for shapes only.
        backend = XLA if self.is_initializing() else choose_on_mesh(self.kernel, demand)
        context = backend.attend(Operands(query, key, value, segment_ids if self.segmented else None), demand)
        return project_output(jnp.einsum, context, self.post, None, backend.names_context), None

    @property
    def visibility(self) -> Visibility:
        return "segment" if self.segmented else "row"

    def matmul_flops(self, *shape: int) -> Flops | None:
        batch, length = shape
        latents = (self.query_latent_dims or 0) + self.latent_dims + self.rotary_dims
        query = (self.query_latent_dims or self.model_dims) * self.dims_per_head
        key_and_value = self.latent_dims * (self._content_dims + self._value_dims)
        per_head = query + key_and_value + self._value_dims * self.model_dims
        pairs = batch * self.num_heads * visible_pairs(length, causal=True)
        attention = Flops(attention=2 * pairs * (self.dims_per_head + self._value_dims))
        return matrix_flops(shape, self.model_dims * latents + self.num_heads * per_head) + attention

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> LatentCache:
        return jnp.zeros((batch_size, 1, length, self.latent_dims + self.rotary_dims), dtype)

    @property
    def _content_dims(self) -> int:
        return self.dims_per_head - self.rotary_dims

    @property
    def _value_dims(self) -> int:
        return self.value_dims_per_head or self._content_dims

    @jax.named_scope(ATTENTION_PROJECTION)
    def _queries(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The two parts of scaled queries, [B, N, T, H - Hr] and [B, N, T, Hr]; the second is rotated."""
        if self.query_latent_dims is not None:
            x = self.query_norm(jnp.einsum("btd,dr->btr", x, self.query_down))
        scale = self.dims_per_head**-0.5 if self.query_scale is None else self.query_scale
        content, rotated = jnp.split(jnp.einsum("btr,rnh->bnth", x, self.query) * scale, (self._content_dims,), axis=-1)
        return content, self.rotate(rotated, positions)

    @jax.named_scope(ATTENTION_PROJECTION)
    def _latents(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normed latents [B, 1, T, R] and rotated keys [B, 1, T, Hr]."""
        latent = self.kv_norm(jnp.einsum("btd,dr->btr", x, self.latent))
        return latent[:, None], self.rotate(jnp.einsum("btd,dr->btr", x, self.rotary_key)[:, None], positions)
