"""The decoder-only language model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.configurable import part, template
from paxcli.config.fields import Fraction, NonNegativeFloat, PositiveInt, SafeOnResume, Tokens
from paxcli.layers.attention.attention import KVCache
from paxcli.layers.block import as_factor
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.output_head import OutputHead
from paxcli.layers.positions import LearnedPositions
from paxcli.layers.stack import Stack
from paxcli.models.base import Model
from paxcli.models.chunked_loss import LossChunk, chunk_size, chunked_token_metrics
from paxcli.models.losses import WeightedScalars, token_metrics
from paxcli.nested_map import NestedMap


class LanguageModel(Model):
    """Embedding, positions, a stack of blocks, a final norm, and logits.

    Pax: `praxis.layers.TransformerLm` in `praxis.layers.models.LanguageModel`. All widths are stated here and flow
    down to the templates below.

    Attributes:
      vocab_size: V.
      max_seq_len: Longest sequence, in training and in decoding (prompt included).
      model_dims: D.
      hidden_dims: F.
      num_layers: L.
      num_heads: N.
      num_kv_heads: K, a divisor of N; None = N.
      dims_per_head: H; None = D / N.
      params_init: How weights start.
      embedding: Template of the token table, which also scores the tokens if there is no `head`.
      head: Template of a matrix of its own that scores tokens, such as `OutputHead.partial()`; None = the table does.
      position: Template of what is added to the embedding; None = nothing.
      stack: Template of the layers.
      final_norm: Template of the norm before the logits.
      label_smoothing: Share of the probability that the loss gives to all other tokens; `log_pplx` is without it.
      z_loss_weight: Factor of a loss that keeps logits near 0, such as 1e-4; `log_pplx` is without it.
      loss_chunk: How many tokens of a device have logits at one time, for the loss; null = all, `auto` = as many as fit
        in 1 GiB where all would be more than 4 GiB. With chunks, `loss` alone of the metrics can be trained on.
    """

    vocab_size: PositiveInt = 0
    max_seq_len: Tokens = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: PositiveInt = 0
    num_heads: PositiveInt = 0
    num_kv_heads: PositiveInt | None = None
    dims_per_head: PositiveInt | None = None
    params_init: Init = part(Xavier)
    embedding: functools.partial = template(TiedEmbedding)
    head: functools.partial[OutputHead] | None = None
    position: functools.partial[LearnedPositions] | None = template(LearnedPositions)
    stack: functools.partial = template(Stack)
    final_norm: functools.partial = template(LayerNorm)
    label_smoothing: Fraction = 0.0
    z_loss_weight: NonNegativeFloat = 0.0
    loss_chunk: SafeOnResume[LossChunk] = "auto"

    def setup(self) -> None:
        dims = self.model_dims
        self._embedding = self.embedding(
            name="embedding", vocab_size=self.vocab_size, model_dims=dims, params_init=self.params_init
        )
        self._head = self._embedding
        if self.head is not None:
            self._head = self.head(
                name="head", vocab_size=self.vocab_size, model_dims=dims, params_init=self.params_init
            )
        if self.position is not None:
            self._position = self.position(
                name="position", model_dims=dims, max_seq_len=self.max_seq_len, params_init=self.params_init
            )
        self._stack = self.stack(
            name="stack",
            num_layers=self.num_layers,
            model_dims=dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
            dims_per_head=self.head_dims,
            num_kv_heads=self.num_kv_heads,
            params_init=self.params_init,
        )
        self._final_norm = self.final_norm(name="final_norm", dims=dims)

    @property
    def head_dims(self) -> int:
        """H."""
        return self.dims_per_head or self.model_dims // self.num_heads

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of packed sequences: `ids`, `segment_ids` and `segment_pos`, all [B, T].

        Where the loss goes in chunks, what logits are made of in their place: `features` [B, T, D].
        """
        return self._predicted(batch.ids, batch)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]. Predictions may bring weights of their own."""
        weights = predictions.get("weights", batch.weights)
        how = (self.label_smoothing, self.z_loss_weight)
        if "logits" in predictions:
            return token_metrics(predictions.logits, batch.labels, weights, *how)
        x = predictions.features
        chunk = chunk_size(self.loss_chunk, x.shape[:2], self.vocab_size)
        assert chunk is not None
        return chunked_token_metrics(self._head.scorer(), x, batch.labels, weights, chunk, *how)

    def _predicted(self, ids: Int[jax.Array, "B T"], batch: NestedMap) -> NestedMap:
        x, _ = self._features(ids, batch.segment_ids, batch.segment_pos, None)
        if chunk_size(self.loss_chunk, ids.shape, self.vocab_size) is None:
            return NestedMap(logits=self._head.logits(x))
        return NestedMap(features=x)

    def extend(
        self,
        ids: Int[jax.Array, "B T"],
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
        cache: KVCache | None,
    ) -> tuple[Float[jax.Array, "B T V"], KVCache | None]:
        """Logits of the tokens that follow; with a cache, of tokens at `segment_pos` of sequences already begun."""
        x, cache = self._features(ids, segment_ids, segment_pos, cache)
        return self._head.logits(x), cache

    def _features(
        self, ids: jax.Array, segment_ids: jax.Array, segment_pos: jax.Array, cache: KVCache | None
    ) -> tuple[Float[jax.Array, "B T D"], KVCache | None]:
        """What logits are made of."""
        x = self._embedding.embed(ids)
        if self.position is not None:
            x = x + self._position(segment_pos).astype(x.dtype)
        x, cache = self._stack(x, cache, segment_ids, segment_pos)
        return as_factor(self._final_norm(x)), cache

    def empty_cache(self, batch_size: int, length: int) -> KVCache:
        """A cache of `length` positions, [L, B, K, S, H] each, in the type of the activations."""
        kv_heads = self.num_kv_heads or self.num_heads
        shape = (self.num_layers, batch_size, kv_heads, length, self.head_dims)
        return KVCache(jnp.zeros(shape, self.fprop_dtype), jnp.zeros(shape, self.fprop_dtype))

    def matmul_shape(self) -> dict[str, Any]:
        """What a FLOP count needs to know of this model."""
        turns = _field(self.stack, "turns") or (_field(self.stack, "block"),)
        feed_forward = _field(turns[0], "feed_forward")
        return dict(
            model_dims=self.model_dims,
            hidden_dims=self.hidden_dims * _field(feed_forward, "num_experts_per_token", 1),
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            dims_per_head=self.head_dims,
            vocab_size=self.vocab_size,
            num_gate_activations=2 if _field(feed_forward, "gated", False) else 1,
            num_experts=_field(feed_forward, "num_experts", 0),
            sliding_window=tuple(_field(_field(turn, "attention"), "window") for turn in turns),
        )


def _field(template: Any, name: str, default: Any = None) -> Any:
    """A field of what a template makes, or `default` if that has none."""
    return template.keywords.get(name, getattr(template.func, name, default)) if template is not None else default
