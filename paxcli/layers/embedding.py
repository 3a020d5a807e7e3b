"""Token embeddings, and the logits that share their table."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.layers.base import Layer
from paxcli.layers.caps import soft_cap
from paxcli.layers.init import Gaussian, Init
from paxcli.mesh.sharding import constrain


class TiedEmbedding(Layer):
    """One table for looking tokens up and for scoring them (Pax: `praxis.layers.SharedEmbeddingSoftmax`).

    Attributes:
      vocab_size: V.
      model_dims: D.
      scale_sqrt_depth: Whether looked-up vectors are multiplied by sqrt(D).
      scale_logits_sqrt_depth: Whether logits are divided by sqrt(D), before the bias.
      use_bias: Whether each token has a bias in its logit.
      logit_cap: `cap * tanh(logit / cap)`; None = off.
      params_init: How the table starts.
    """

    vocab_size: int
    model_dims: int
    scale_sqrt_depth: bool = False
    scale_logits_sqrt_depth: bool = False
    use_bias: bool = False
    logit_cap: float | None = None
    params_init: Init = Gaussian()

    def setup(self) -> None:
        shape = (self.vocab_size, self.model_dims)
        self.table = self.weight("table", self.params_init.table(self.model_dims), shape, ("vocab", "embed"))
        if self.use_bias:
            self.bias = self.weight("bias", nn.initializers.zeros, (self.vocab_size,), ("vocab",))

    def embed(self, ids: Int[jax.Array, "B T"]) -> Float[jax.Array, "B T D"]:
        """Looks tokens up."""
        vectors = jnp.take(self.table, ids, axis=0)
        if self.scale_sqrt_depth:
            vectors = vectors * jnp.asarray(self.model_dims**0.5, vectors.dtype)
        return constrain(vectors, "activation_batch", "activation_length", "activation_embed")

    def logits(self, x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T V"]:
        """Scores every token of the vocabulary."""
        logits = jnp.einsum("btd,vd->btv", x, self.table)
        if self.scale_logits_sqrt_depth:
            logits = logits / jnp.asarray(self.model_dims**0.5, logits.dtype)
        if self.use_bias:
            logits = logits + self.bias
        logits = soft_cap(logits, self.logit_cap)
        return constrain(logits, "activation_batch", "activation_length", "activation_vocab")
