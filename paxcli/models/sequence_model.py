"""The encoder-decoder (sequence-to-sequence) model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.configurable import template
from paxcli.config.fields import Fraction, LayerCount
from paxcli.layers.base import Cache, Ids, SourceIds, cache_of, flops_of
from paxcli.layers.block import as_matmul_input
from paxcli.layers.decoder import Decoder
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.positions import SinusoidPositions
from paxcli.layers.stack import Encoder, Stack, find_stacks
from paxcli.models.base import PerRow, Seq2SeqModel, take_last
from paxcli.models.losses import WeightedScalars, token_metrics
from paxcli.models.transformer import TransformerModel
from paxcli.nested_map import NestedMap


class Seq2SeqCache(NamedTuple):
    """The decode cache of a `SequenceModel`.

    Attributes:
      layers: The cache of the decoder; None in training.
      source: The encoded source [B, S, D]; None once the decoder has cached its keys and values.
      source_segment_ids: 1 at tokens of the source, 0 at padding, [B, S].
    """

    layers: Cache
    source: jax.Array | None
    source_segment_ids: jax.Array


class SequenceModel(TransformerModel, Seq2SeqModel):
    """Encodes a source with bidirectional attention and decodes a target token by token (Vaswani et al., 2017).

    Pax: `praxis.layers.TransformerEncoderDecoder` in `praxis.layers.models.SequenceModel`. Source and target share the
    token table, which also computes the logits, and the positions.

    Attributes:
      num_encoder_layers: Layers of the encoder; None = `num_layers`, those of the decoder.
      label_smoothing: Probability that the loss spreads over all other tokens; `log_pplx` is without it.
      position: Template of what is added to the embedding.
      encoder: Template of the encoder's layers.
      encoder_norm: Template of the norm after them.
      decoder: Template of the decoder's layers.

    The other fields are those of `TransformerModel`; `max_seq_len` is that of the source and of the target.
    """

    num_encoder_layers: LayerCount | None = None
    label_smoothing: Fraction = 0.0
    position: functools.partial = template(SinusoidPositions)  # pyrefly: ignore[bad-override]
    encoder: functools.partial = template(Encoder)
    encoder_norm: functools.partial = template(LayerNorm)
    decoder: functools.partial = template(Decoder)

    def setup(self) -> None:
        super().setup()
        self._encoder = self._encoder_template(name="encoder")
        self._encoder_norm = self.encoder_norm(name="encoder_norm", dims=self.model_dims)
        self._decoder = self._decoder_template(name="decoder")

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Logits [B, T, V] of the target, with teacher forcing.

        Source: `source_ids`, `source_segment_ids`, `source_segment_pos`, all [B, S]; target: `ids`, `segment_ids`,
        `segment_pos`, all [B, T]. A target segment attends to the source segment of the same number.
        """
        source = self.encode(batch.source_ids, batch.source_segment_ids, batch.source_segment_pos)
        cache = Seq2SeqCache(None, source, batch.source_segment_ids)
        return NestedMap(logits=self.extend(batch.ids, batch.segment_ids, batch.segment_pos, cache)[0])

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Mean cross-entropy of `labels` by `weights`, both [B, T]."""
        return token_metrics(predictions.logits, batch.labels, batch.weights, self.label_smoothing)

    def forward_flops(self, spec: NestedMap) -> Flops | None:
        (batch, length), source_length = spec.labels.shape, spec.source_ids.shape[1]
        encoder = flops_of(self._encoder_template(parent=None), batch, source_length)
        decoder = flops_of(self._decoder_template(parent=None), batch, length, source_length)
        return sum_flops((encoder, decoder, flops_of(self.embedding(**self._table_widths, parent=None), batch, length)))

    def stacks(self) -> Mapping[str, Stack]:
        return find_stacks(encoder=self._encoder_template(parent=None), decoder=self._decoder_template(parent=None))

    def encode(self, ids: SourceIds, segment_ids: SourceIds, segment_pos: SourceIds) -> Float[jax.Array, "B S D"]:
        """The encoded source, which the decoder attends to."""
        x, _ = self._encoder(self._embed(ids, segment_pos), None, segment_ids, segment_pos)
        return as_matmul_input(self._encoder_norm(x))

    def encode_source(self, ids: SourceIds, segment_ids: SourceIds, length: int) -> Seq2SeqCache:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        layers = cache_of(self._decoder_template(parent=None), len(ids), length, self.fprop_dtype)
        return Seq2SeqCache(layers, self.encode(ids, segment_ids, positions), segment_ids)

    def extend(
        self, ids: Ids, segment_ids: Ids, segment_pos: Ids, cache: Seq2SeqCache, last: PerRow | None = None
    ) -> tuple[Float[jax.Array, "B t V"], Seq2SeqCache]:
        x = self._embed(ids, segment_pos)
        x, layers = self._decoder(x, cache.layers, segment_ids, segment_pos, cache.source, cache.source_segment_ids)
        x = as_matmul_input(self._final_norm(take_last(x, last)))
        return self._embedding.logits(x), Seq2SeqCache(layers, None, cache.source_segment_ids)

    @property
    def _encoder_template(self) -> functools.partial:
        layers = self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers
        return functools.partial(self.encoder, num_layers=layers, **self._widths)

    @property
    def _decoder_template(self) -> functools.partial:
        return functools.partial(self.decoder, num_layers=self.num_layers, **self._widths)
