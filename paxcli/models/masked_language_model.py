"""The bidirectional language model that fills in blanks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.config.fields import Fraction, NonNegativeInt
from paxcli.errors import ConfigError
from paxcli.layers.attention.attention import KVCache
from paxcli.layers.stack import Encoder
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap


class MaskedLanguageModel(LanguageModel):
    """Hides some of the tokens and predicts them from the others (Devlin et al., 2019; Pax: `BertModel`).

    The tokens of a batch are its `labels`. A batch that has `masked_ids` and `masked_pos` is read as it is masked; in
    any other the model chooses: in training afresh at each step, in evaluation always the same tokens of the same row,
    in whatever batch it comes.

    Attributes:
      stack: Template of the layers. The other fields that are not here are those of `LanguageModel`.
      mask_id: The id that hides a token.
      mask_prob: Share of the tokens that are predicted and hidden.
      random_prob: Share that is predicted and replaced by any token of the vocabulary.
      same_prob: Share that is predicted and left as it is.
    """

    stack: functools.partial = template(Encoder)
    mask_id: NonNegativeInt = 0
    mask_prob: Fraction = 0.12
    random_prob: Fraction = 0.015
    same_prob: Fraction = 0.015

    def setup(self) -> None:
        if not 0 <= self.mask_id < self.vocab_size:
            raise ConfigError(f"mask_id={self.mask_id} is no id of a vocabulary of {self.vocab_size}.")
        super().setup()

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """What a `LanguageModel` predicts, and the `weights` [B, T] of the predicted tokens."""
        if "masked_ids" in batch:
            ids, weights = batch.masked_ids, batch.masked_pos.astype(jnp.float32)
        else:
            ids, weights = self.masked(batch.labels, batch.weights)
        return NestedMap(self._predicted(ids, batch), weights=weights)

    def masked(
        self, labels: Int[jax.Array, "B T"], weights: Float[jax.Array, "B T"]
    ) -> tuple[Int[jax.Array, "B T"], Float[jax.Array, "B T"]]:
        """What the model reads in place of `labels`, and the weights of what it predicts; no token of weight 0."""
        key = self.make_rng("dropout") if self.has_rng("dropout") else jax.random.key(0)
        draw, others = jax.vmap(functools.partial(_draws, key, self.vocab_size))(labels)
        chosen = (draw < self.mask_prob + self.random_prob + self.same_prob) & (weights > 0)
        ids = jnp.where(draw < self.mask_prob + self.random_prob, others, labels)
        ids = jnp.where(draw < self.mask_prob, self.mask_id, ids)
        return jnp.where(chosen, ids, labels), weights * chosen

    def empty_cache(self, batch_size: int, length: int) -> KVCache:
        """A model that reads in both directions cannot continue a text."""
        raise ConfigError("A MaskedLanguageModel fills in blanks; it continues no text.", "Decode a LanguageModel.")

    def matmul_shape(self) -> dict[str, Any]:
        return super().matmul_shape() | {"causal": False}


def _draws(key: jax.Array, vocab_size: int, row: Int[jax.Array, " T"]) -> tuple[jax.Array, jax.Array]:
    """For each position a number in [0, 1) and a token, both from the key and the row's own tokens."""
    weights = jnp.arange(1, len(row) + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    row_hash = jnp.sum(row.astype(jnp.uint32) * weights)
    draw_key, token_key = jax.random.split(jax.random.fold_in(key, row_hash))
    return jax.random.uniform(draw_key, row.shape), jax.random.randint(token_key, row.shape, 0, vocab_size, row.dtype)
