"""One layer of a transformer: attention and feed-forward with norms and residual connections."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax

from paxcli.config.configurable import template
from paxcli.config.fields import DropoutRate, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.activations import dropout, identity
from paxcli.layers.attention.attention import Attention
from paxcli.layers.base import Block, Cache, HiddenStates, Ids, Layer, Visibility, cache_of, flops_of, visibility_of
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.fp8 import Precision
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.remat import save_as
from paxcli.layers.scopes import ATTENTION
from paxcli.layers.summaries import report_activation
from paxcli.mesh.sharding import constrain, layout

_ROWS = ("activation_batch", "activation_length")
_RESIDUAL, _MATMUL_INPUT = (*_ROWS, "activation_residual"), (*_ROWS, "activation_embed")


class TransformerBlock(Block):
    """Pre-norm block: `x + attention(norm(x))`, then `x + feed_forward(norm(x))` (Pax: `Transformer`).

    A stack takes any Flax module with this `__call__` and the fields `model_dims` to `num_kv_heads` and `params_init`.
    To count its FLOPs and to decode, it derives from `CachedLayer`.

    Attributes:
      model_dims: D.
      hidden_dims: F.
      num_heads: N.
      dims_per_head: H.
      num_kv_heads: K; None = N.
      norm: Template of the two norms.
      attention: Template of the attention.
      feed_forward: Template of the feed-forward layer.
      post_norms: Whether a norm also follows attention and feed-forward, before the residual is added ("sandwich" norm:
        Ding et al., 2021); or `feed_forward`: it follows the feed-forward only.
      pre_norms: Whether a norm precedes attention and feed-forward. Without, set `post_norms` (OLMo et al., 2024).
      zero_padding: Whether the feed-forward adds 0 at padding (segment 0), as in Pax. No token depends on it.
      residual_dropout_prob: Share of the elements of each branch's output, of attention and feed-forward, that training
        drops before the output is added to the residual stream (dropout: Srivastava et al., 2014).
      precision: `fp8` computes matmuls with weights in 8 bits in training; None = in the dtype of the activations.
      params_init: Initializer of the weights.
    """

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_heads: PositiveInt
    dims_per_head: PositiveInt
    num_kv_heads: PositiveInt | None = None
    norm: functools.partial = template(LayerNorm)
    attention: functools.partial = template(Attention)
    feed_forward: functools.partial = template(FeedForward)
    post_norms: bool | Literal["feed_forward"] = False
    pre_norms: bool = True
    zero_padding: bool = False
    residual_dropout_prob: DropoutRate = 0.0
    precision: Precision | None = None
    params_init: Init = Xavier()

    def setup(self) -> None:
        self.attention_norm = self.norm(dims=self.model_dims) if self.pre_norms else identity
        self._attention = self._attention_template(name=ATTENTION)
        self.feed_forward_norm = self.norm(dims=self.model_dims) if self.pre_norms else identity
        self._feed_forward = self._feed_forward_template(name="feed_forward")
        self.attention_post_norm = self.norm(dims=self.model_dims) if self.post_norms is True else identity
        self.feed_forward_post_norm = self.norm(dims=self.model_dims) if self.post_norms else identity

    def __call__(self, x: HiddenStates, cache: Cache, segment_ids: Ids, segment_pos: Ids) -> tuple[HiddenStates, Cache]:
        x = as_residual(x)
        report_activation(self, x, segment_ids)
        normed = self.attention_norm(x)
        attended, cache = self._attend(normed, cache, segment_ids, segment_pos)
        y = x + attended
        return y + self._feed(self._feed_forward_input(x, normed, y), segment_ids), cache

    def matmul_flops(self, *shape: int) -> Flops | None:
        layers = (self._attention_template(parent=None), self._feed_forward_template(parent=None))
        return sum_flops(flops_of(layer, *shape) for layer in layers)

    @property
    def visibility(self) -> Visibility:
        return visibility_of(self._attention_template(parent=None))

    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        return cache_of(self._attention_template(parent=None), batch_size, length, dtype)

    @property
    def _attention_template(self) -> functools.partial:
        return functools.partial(self._with_precision(self.attention), **self._attention_widths)

    @property
    def _feed_forward_template(self) -> functools.partial:
        widths = self.named_fields("model_dims", "hidden_dims", "params_init")
        part = self._with_precision(self.feed_forward)
        if not issubclass(part.func, Layer):  # pyrefly: ignore
            widths = {name: width for name, width in widths.items() if name in _field_names(part)}
        return functools.partial(part, **widths)

    @property
    def _attention_widths(self) -> dict[str, Any]:
        return self.named_fields("model_dims", "num_heads", "dims_per_head", "num_kv_heads", "params_init")

    def _with_precision(self, part: functools.partial) -> functools.partial:
        """The template of a sub-layer, with this layer's `precision`."""
        if self.precision is None:
            return part
        if "precision" not in _field_names(part):
            raise ConfigError(f"{part.func.__name__} does not compute in {self.precision}.", "Set `precision` to null.")
        return functools.partial(part, precision=self.precision)

    def _attend(self, x: jax.Array, cache: Cache, segment_ids: Ids, segment_pos: Ids) -> tuple[jax.Array, Cache]:
        """The output of attention, to be added to the residual stream, from the normed `x`."""
        y, cache = self._attention(as_matmul_input(x), segment_ids, segment_pos, cache)
        return dropout(self, self.residual_dropout_prob)(self.attention_post_norm(y)), cache

    def _feed_forward_input(self, x: jax.Array, normed: jax.Array, y: jax.Array) -> jax.Array:
        """Input of the feed-forward, from the block's `x`, its norm, which attention reads, and `x` plus attention."""
        return self.feed_forward_norm(y)

    def _feed(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """The output of the feed-forward, to be added to the residual stream, from the normed `x`."""
        y = self.feed_forward_post_norm(self._feed_forward(as_matmul_input(x)))
        y = dropout(self, self.residual_dropout_prob)(y)
        return y * (segment_ids != 0)[..., None].astype(y.dtype) if self.zero_padding else y


class ParallelBlock(TransformerBlock):
    """`x + attention(norm(x)) + feed_forward(norm(x))` (Chowdhery et al., 2022, section 2).

    Its other fields are those of `TransformerBlock`. Flax makes no `feed_forward_norm` if nothing calls it.

    Attributes:
      shared_norm: Whether attention and feed-forward read the output of one norm; if not, each has its own, as in
        GPT-NeoX (Black et al., 2022).
    """

    shared_norm: bool = True

    def _feed_forward_input(self, x: jax.Array, normed: jax.Array, y: jax.Array) -> jax.Array:
        return normed if self.shared_norm else self.feed_forward_norm(x)


class EncoderBlock(TransformerBlock):
    """A block with bidirectional attention (Devlin et al., 2019; Pax: `mask_self_attention=False`)."""

    attention: functools.partial = template(Attention, causal=False)


def as_residual(x: HiddenStates) -> HiddenStates:
    """`x` with the sharding of the residual stream between layers, and its name for remat policies."""
    return save_as("layer_input", constrain(x, *_RESIDUAL) if _differ(x) else x)


def as_matmul_input(x: HiddenStates) -> HiddenStates:
    """`x` with the sharding that matmuls with weights need."""
    return constrain(x, *_MATMUL_INPUT) if _differ(x) else x


def _field_names(part: functools.partial) -> set[str]:
    return {field.name for field in dataclasses.fields(part.func)}  # pyrefly: ignore


def _differ(x: jax.Array) -> bool:
    """Whether the residual stream and matmul inputs are sharded differently on the mesh in use."""
    return layout(x.shape, *_RESIDUAL) != layout(x.shape, *_MATMUL_INPUT)
