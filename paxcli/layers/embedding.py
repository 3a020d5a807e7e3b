"""Token embeddings, tied to the output head: one table looks tokens up and scores them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from paxcli.layers.base import HiddenStates, Ids
from paxcli.layers.init import Gaussian, Init
from paxcli.layers.matmul import einsum
from paxcli.layers.output_head import Head, Scorer, finish_logits
from paxcli.layers.shared_weights import look_up
from paxcli.mesh.sharding import constrain, split

_AXES = {"table": ("vocab", "embed"), "bias": ("vocab",)}


class TiedEmbedding(Head):
    """One table [V, D] for token embeddings and logits (weight tying; Pax: `praxis.layers.SharedEmbeddingSoftmax`).

    Attributes:
      scale_sqrt_depth: Whether looked-up vectors are multiplied by sqrt(D).
      scale_logits_sqrt_depth: Whether logits are divided by sqrt(D), before the bias.
      params_init: Initializer of the table.
    """

    scale_sqrt_depth: bool = False
    scale_logits_sqrt_depth: bool = False
    params_init: Init = Gaussian()

    def setup(self) -> None:
        self.table = self.lookup_table("table", self.params_init, (self.vocab_size, self.model_dims), _AXES["table"])
        if self.use_bias:
            self.bias = self.zero_weight("bias", (self.vocab_size,), _AXES["bias"])

    def embed(self, ids: Ids) -> HiddenStates:
        """Looks tokens up."""
        table = self.table
        if split(ids.shape, "activation_batch", None) != split(ids.shape, "activation_microbatch", None):
            # Pipeline stages share the rows: without this constraint, XLA replicates the vectors of all rows.
            table = constrain(table, None, "activation_residual")
        vectors = look_up(table, ids)
        if self.scale_sqrt_depth:
            vectors = vectors * jnp.asarray(self.model_dims**0.5, vectors.dtype)
        return constrain(vectors, "activation_batch", "activation_length", "activation_residual")

    def scorer(self) -> Scorer:
        params = {"table": self.table} | ({"bias": self.bias} if self.use_bias else {})
        divisor = self.model_dims**0.5 if self.scale_logits_sqrt_depth else None
        return Scorer(functools.partial(_score, divisor=divisor, logit_cap=self.logit_cap), params, _AXES)


def _score(params: dict[str, jax.Array], x: jax.Array, divisor: float | None, logit_cap: float | None) -> jax.Array:
    logits = einsum("btd,vd->btv", x, params["table"])
    if divisor is not None:
        logits = logits / jnp.asarray(divisor, logits.dtype)
    return finish_logits(logits, params.get("bias"), logit_cap)
