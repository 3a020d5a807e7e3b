"""The encoder-decoder."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.configurable import part, template
from paxcli.config.fields import Fraction, PositiveInt, Tokens
from paxcli.layers.attention.attention import KVCache
from paxcli.layers.decoder import Decoder, DecoderCache
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.positions import SinusoidPositions
from paxcli.layers.stack import Encoder
from paxcli.models.base import Model
from paxcli.models.decoding import Generated, Sampling, generate
from paxcli.models.losses import WeightedScalars, token_metrics
from paxcli.nested_map import NestedMap

_GREEDY = Sampling()


class Begun(NamedTuple):
    """A target sequence under way.

    Attributes:
      layers: What the decoder keeps, all layers stacked.
      source: The encoded source [B, S, D]; None once the layers keep its keys and values.
      source_segment_ids: Where the source has tokens, [B, S].
    """

    layers: DecoderCache
    source: jax.Array | None
    source_segment_ids: jax.Array


class SequenceModel(Model):
    """Reads a source in both directions and writes a target token by token (Vaswani et al., 2017).

    Pax: `praxis.layers.TransformerEncoderDecoder` in `praxis.layers.models.SequenceModel`. Source and target share the
    token table and the positions. All widths are stated here and flow down to the templates below.

    Attributes:
      vocab_size: V.
      max_seq_len: Longest source and longest target.
      model_dims: D.
      hidden_dims: F.
      num_layers: L, of the decoder.
      num_encoder_layers: Layers of the encoder; None = L.
      num_heads: N.
      num_kv_heads: K, a divisor of N; None = N.
      dims_per_head: H; None = D / N.
      label_smoothing: Share of the probability that the loss gives to all other tokens; `log_pplx` is without it.
      params_init: How weights start.
      embedding: Template of the token table, which also scores the tokens.
      position: Template of what is added to the embedding.
      encoder: Template of the layers that read the source.
      encoder_norm: Template of the norm after them.
      decoder: Template of the layers that write the target.
      final_norm: Template of the norm before the logits.
    """

    vocab_size: PositiveInt = 0
    max_seq_len: Tokens = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: PositiveInt = 0
    num_encoder_layers: PositiveInt | None = None
    num_heads: PositiveInt = 0
    num_kv_heads: PositiveInt | None = None
    dims_per_head: PositiveInt | None = None
    label_smoothing: Fraction = 0.0
    params_init: Init = part(Xavier)
    embedding: functools.partial = template(TiedEmbedding)
    position: functools.partial = template(SinusoidPositions)
    encoder: functools.partial = template(Encoder)
    encoder_norm: functools.partial = template(LayerNorm)
    decoder: functools.partial = template(Decoder)
    final_norm: functools.partial = template(LayerNorm)

    def setup(self) -> None:
        dims, init = self.model_dims, self.params_init
        widths = dict(
            model_dims=dims,
            hidden_dims=self.hidden_dims,
            num_heads=self.num_heads,
            dims_per_head=self.head_dims,
            num_kv_heads=self.num_kv_heads,
            params_init=init,
        )
        self._embedding = self.embedding(
            name="embedding", vocab_size=self.vocab_size, model_dims=dims, params_init=init
        )
        self._position = self.position(name="position", model_dims=dims, max_seq_len=self.max_seq_len, params_init=init)
        encoder_layers = self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers
        self._encoder = self.encoder(name="encoder", num_layers=encoder_layers, **widths)
        self._encoder_norm = self.encoder_norm(name="encoder_norm", dims=dims)
        self._decoder = self.decoder(name="decoder", num_layers=self.num_layers, **widths)
        self._final_norm = self.final_norm(name="final_norm", dims=dims)

    @property
    def head_dims(self) -> int:
        """H."""
        return self.dims_per_head or self.model_dims // self.num_heads

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of the target, each token given the true ones before it.

        Source: `source_ids`, `source_segment_ids`, `source_segment_pos`, all [B, S]; target: `ids`, `segment_ids`,
        `segment_pos`, all [B, T]. A target segment reads the source segment of the same number.
        """
        source = self.encode(batch.source_ids, batch.source_segment_ids, batch.source_segment_pos)
        x, _ = self._decoder(
            self._embedded(batch.ids, batch.segment_pos),
            None,
            batch.segment_ids,
            batch.segment_pos,
            source,
            batch.source_segment_ids,
        )
        return NestedMap(logits=self._embedding.logits(self._final_norm(x)))

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]."""
        return token_metrics(predictions.logits, batch.labels, batch.weights, self.label_smoothing)

    def encode(
        self, ids: Int[jax.Array, "B S"], segment_ids: Int[jax.Array, "B S"], segment_pos: Int[jax.Array, "B S"]
    ) -> Float[jax.Array, "B S D"]:
        """What the decoder reads."""
        x, _ = self._encoder(self._embedded(ids, segment_pos), None, segment_ids, segment_pos)
        return self._encoder_norm(x)

    def begin(self, ids: Int[jax.Array, "B S"], segment_ids: Int[jax.Array, "B S"], length: int) -> Begun:
        """What `extend` needs to write up to `length` target tokens for sources of one segment each."""
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        shape = (self.num_layers, len(ids), self.num_kv_heads or self.num_heads, length, self.head_dims)
        zeros = jnp.zeros(shape, self.fprop_dtype)
        return Begun(DecoderCache(KVCache(zeros, zeros)), self.encode(ids, segment_ids, positions), segment_ids)

    def extend(
        self,
        ids: Int[jax.Array, "B T"],
        segment_ids: Int[jax.Array, "B T"],
        segment_pos: Int[jax.Array, "B T"],
        cache: Begun,
    ) -> tuple[Float[jax.Array, "B T V"], Begun]:
        """Logits of the tokens that follow target tokens at `segment_pos`."""
        x = self._embedded(ids, segment_pos)
        x, layers = self._decoder(x, cache.layers, segment_ids, segment_pos, cache.source, cache.source_segment_ids)
        return self._embedding.logits(self._final_norm(x)), Begun(layers, None, cache.source_segment_ids)

    def _embedded(self, ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = self._embedding.embed(ids)
        return x + self._position(positions).astype(x.dtype)


def transduce(
    model: SequenceModel,
    params: dict,
    source_ids: Int[jax.Array, "B S"],
    source_segment_ids: Int[jax.Array, "B S"],
    max_tokens: int,
    bos_id: int,
    eos_id: int | None,
    sampling: Sampling = _GREEDY,
    key: jax.Array | None = None,
) -> Generated:
    """The target of each source, greedily unless `sampling` says otherwise: `bos_id` and up to `max_tokens` tokens."""
    begun = model.apply({"params": params}, source_ids, source_segment_ids, max_tokens + 1, method="begin")
    batch = len(source_ids)
    prompts, lengths = jnp.full((batch, 1), bos_id, jnp.int32), jnp.ones(batch, jnp.int32)
    key = jax.random.key(0) if key is None else key
    return generate(model, params, prompts, lengths, key, max_tokens, eos_id, sampling, begun)
