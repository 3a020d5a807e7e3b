"""Base class of transformer models: the widths, stated once at the model, and the checks on them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from paxcli.config.configurable import part, template
from paxcli.config.fields import DropoutRate, LayerCount, PositiveInt, Tokens
from paxcli.errors import ConfigError
from paxcli.layers.activations import dropout
from paxcli.layers.base import HiddenStates
from paxcli.layers.embedding import TiedEmbedding
from paxcli.layers.init import Init, Xavier
from paxcli.layers.layer_norm import LayerNorm
from paxcli.layers.positions import LearnedPositions
from paxcli.mesh.axes import Axis
from paxcli.models.base import InputSizes, Model, check_mesh_divides


class TransformerModel(Model):
    """A model of tokens made of transformer blocks. Its widths are passed down to the templates of its layers.

    Attributes:
      vocab_size: V.
      max_seq_len: Longest sequence, in training and in decoding (prompt included).
      model_dims: D.
      hidden_dims: F.
      num_layers: L.
      num_heads: N.
      num_kv_heads: K, a divisor of N; None = N. Fewer is GQA, 1 multi-query attention.
      dims_per_head: H; None = D / N.
      params_init: Initializer of the weights.
      embedding: Template of the token embedding, which also computes the logits unless the model has another head.
      position: Template of what is added to the embedding; None = nothing.
      final_norm: Template of the norm before the logits.
      input_dropout_prob: Share of the elements of the embedded tokens, positions added, that training drops.
    """

    vocab_size: PositiveInt = 0
    max_seq_len: Tokens = 0
    model_dims: PositiveInt = 0
    hidden_dims: PositiveInt = 0
    num_layers: LayerCount = 0
    num_heads: PositiveInt = 0
    num_kv_heads: PositiveInt | None = None
    dims_per_head: PositiveInt | None = None
    params_init: Init = part(Xavier)
    embedding: functools.partial = template(TiedEmbedding)
    position: functools.partial[LearnedPositions] | None = template(LearnedPositions)
    final_norm: functools.partial = template(LayerNorm)
    input_dropout_prob: DropoutRate = 0.0

    def setup(self) -> None:
        self._embedding = self.embedding(name="embedding", **self._table_widths)
        if self.position is not None:
            same = self.named_fields("model_dims", "max_seq_len", "params_init")
            self._position = self.position(name="position", **same)
        self._final_norm = self.final_norm(name="final_norm", dims=self.model_dims)

    def _embed(self, ids: jax.Array, positions: jax.Array) -> HiddenStates:
        """Embedded tokens, with what their positions add."""
        x = self._embedding.embed(ids)
        x = x if self.position is None else x + self._position(positions).astype(x.dtype)
        return dropout(self, self.input_dropout_prob)(x)

    @property
    def head_dims(self) -> int:
        """H."""
        return self.dims_per_head or self.model_dims // self.num_heads

    @property
    def input_sizes(self) -> InputSizes:
        return InputSizes(seq_len=self.max_seq_len, vocab_size=self.vocab_size)

    def validate(self, mesh: Mapping[str, int]) -> None:
        dims, heads = self.model_dims, self.num_heads
        if not self.dims_per_head and dims % heads:
            hint = "Change one of them, or set `dims_per_head`."
            raise ConfigError(f"model_dims={dims} does not divide into num_heads={heads} heads.", hint)
        if self.num_kv_heads and heads % self.num_kv_heads:
            hint = "Change one of them."
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={heads}.", hint)
        check_mesh_divides(mesh, Axis.TENSOR, **self.named_fields("num_heads", "num_kv_heads", "hidden_dims"))
        check_mesh_divides(mesh, Axis.FSDP, model_dims=self.model_dims)

    @property
    def _widths(self) -> dict[str, Any]:
        """The fields of a stack, but its number of layers."""
        same = self.named_fields("model_dims", "hidden_dims", "num_heads", "num_kv_heads", "params_init")
        return same | {"dims_per_head": self.head_dims}

    @property
    def _table_widths(self) -> dict[str, Any]:
        """The fields of the embedding and the head."""
        return self.named_fields("vocab_size", "model_dims", "params_init")
