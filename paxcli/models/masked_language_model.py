"""The masked language model (BERT)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.configurable import template
from paxcli.config.fields import Fraction, NonNegativeInt
from paxcli.errors import ConfigError
from paxcli.layers.base import Ids
from paxcli.layers.stack import Encoder
from paxcli.models.base import MASKING
from paxcli.models.language_model import TransformerLm
from paxcli.nested_map import NestedMap


class MaskedLanguageModel(TransformerLm):
    """Masks some tokens and predicts them from all others (Devlin et al., 2019; Pax: `BertModel`). It does not decode.

    The tokens of a batch are its `labels`. In a batch with `masked_ids` and `masked_pos` these are the masked ones;
    otherwise the model chooses: at random at each training step; in evaluation as a function of the row's tokens only.

    Attributes:
      stack: Template of the layers.
      mask_id: The id that replaces a masked token.
      mask_prob: Share of the tokens that are predicted and masked.
      random_prob: Share that is predicted and replaced by a random token.
      same_prob: Share that is predicted and left unchanged.

    The other fields are those of `TransformerLm`.
    """

    stack: functools.partial = template(Encoder)
    mask_id: NonNegativeInt = 0
    mask_prob: Fraction = 0.12
    random_prob: Fraction = 0.015
    same_prob: Fraction = 0.015

    def setup(self) -> None:
        if not 0 <= self.mask_id < self.vocab_size:
            hint = "Choose an id of the vocabulary."
            raise ConfigError(f"mask_id={self.mask_id} is not an id of a vocabulary of {self.vocab_size}.", hint)
        share = self.mask_prob + self.random_prob + self.same_prob
        if not 0 < share <= 1:
            hint = "Correct these three."
            raise ConfigError(f"mask_prob + random_prob + same_prob = {share:g} has to be above 0 and at most 1.", hint)
        super().setup()

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Predictions as those of a `TransformerLm`, and the `weights` [B, T] of the masked tokens."""
        if "masked_ids" in batch:
            ids, weights = batch.masked_ids, batch.masked_pos.astype(jnp.float32)
        else:
            ids, weights = self.mask(batch.labels, batch.weights)
        return NestedMap(self._predict(ids, batch), weights=weights)

    def mask(self, labels: Ids, weights: Float[jax.Array, "B T"]) -> tuple[Ids, Float[jax.Array, "B T"]]:
        """The model's input instead of `labels`, and the weights of the predicted tokens, all weighted in `weights`."""
        key = self.make_rng(MASKING) if self.has_rng(MASKING) else jax.random.key(0)
        draw, others = jax.vmap(functools.partial(_draws, key, self.vocab_size))(labels)
        chosen = (draw < self.mask_prob + self.random_prob + self.same_prob) & (weights > 0)
        ids = jnp.where(draw < self.mask_prob + self.random_prob, others, labels)
        ids = jnp.where(draw < self.mask_prob, self.mask_id, ids)
        return jnp.where(chosen, ids, labels), weights * chosen


def _draws(key: jax.Array, vocab_size: int, row: Int[jax.Array, " T"]) -> tuple[jax.Array, jax.Array]:
    """For each position a number in [0, 1) and a token, both drawn from the key and the row's tokens."""
    weights = jnp.arange(1, len(row) + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    draw_key, token_key = jax.random.split(jax.random.fold_in(key, jnp.sum(row.astype(jnp.uint32) * weights)))
    return jax.random.uniform(draw_key, row.shape), jax.random.randint(token_key, row.shape, 0, vocab_size, row.dtype)
