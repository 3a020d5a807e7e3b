"""Token embeddings, tied to the output head: one table looks tokens up and scores them."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.config.fields import PositiveFloat, PositiveInt
from paxcli.layers.activations import soft_cap
from paxcli.layers.base import Layer
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.init import Gaussian, Init
from paxcli.layers.output_head import Scorer
from paxcli.mesh.sharding import constrain, split

_AXES = {"table": ("vocab", "embed"), "bias": ("vocab",)}


class TiedEmbedding(Layer):
    """One table [V, D] for token embeddings and logits (weight tying; Pax: `praxis.layers.SharedEmbeddingSoftmax`).

    Attributes:
      vocab_size: V.
      model_dims: D.
      scale_sqrt_depth: Whether looked-up vectors are multiplied by sqrt(D).
      scale_logits_sqrt_depth: Whether logits are divided by sqrt(D), before the bias.
      use_bias: Whether each token's logit has a bias.
      logit_cap: `cap * tanh(logit / cap)` (soft cap); None = off.
      params_init: Initializer of the table.
    """

    vocab_size: PositiveInt
    model_dims: PositiveInt
    scale_sqrt_depth: bool = False
    scale_logits_sqrt_depth: bool = False
    use_bias: bool = False
    logit_cap: PositiveFloat | None = None
    params_init: Init = Gaussian()

    def setup(self) -> None:
        shape = (self.vocab_size, self.model_dims)
        self.table = self.lookup_table("table", self.params_init, shape, _AXES["table"])
        if self.use_bias:
            self.bias = self.weight("bias", nn.initializers.zeros, (self.vocab_size,), _AXES["bias"])

    def embed(self, ids: Int[jax.Array, "B T"]) -> Float[jax.Array, "B T D"]:
        """Looks tokens up."""
        table = self.table
        if split(ids.shape, "activation_batch", None) != split(ids.shape, "activation_microbatch", None):
            # Pipeline stages share the rows: without this constraint, XLA replicates the vectors of all rows.
            table = constrain(table, None, "activation_residual")
        vectors = jnp.take(table, ids, axis=0)
        if self.scale_sqrt_depth:
            vectors = vectors * jnp.asarray(self.model_dims**0.5, vectors.dtype)
        return constrain(vectors, "activation_batch", "activation_length", "activation_residual")

    @nn.nowrap
    def matmul_flops(self, *shape: int) -> Flops | None:
        """FLOPs of the logits; a look-up is not a matmul."""
        return matrix_flops(shape, self.model_dims * self.vocab_size)

    def logits(self, x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T V"]:
        """Scores every token of the vocabulary."""
        scorer = self.scorer()
        return scorer.score(scorer.params, x)

    def scorer(self) -> Scorer:
        """The function and parameters of `logits`, for a loss that scores tokens in chunks."""
        params = {"table": self.table} | ({"bias": self.bias} if self.use_bias else {})
        divisor = self.model_dims**0.5 if self.scale_logits_sqrt_depth else None
        score = functools.partial(_score, divisor=divisor, logit_cap=self.logit_cap)
        return Scorer(score, params, {name: _AXES[name] for name in params})


def _score(params: dict[str, jax.Array], x: jax.Array, divisor: float | None, logit_cap: float | None) -> jax.Array:
    logits = jnp.einsum("btd,vd->btv", x, params["table"])
    if divisor is not None:
        logits = logits / jnp.asarray(divisor, logits.dtype)
    if "bias" in params:
        logits = logits + params["bias"]
    logits = soft_cap(logits, logit_cap)
    return constrain(logits, "activation_batch", "activation_length", "activation_vocab")
