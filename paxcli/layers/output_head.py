"""The output head (LM head): logits from a matrix of its own, not tied to the embedding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Float

from paxcli.config.fields import PositiveFloat, PositiveInt
from paxcli.layers.activations import soft_cap
from paxcli.layers.base import HiddenStates, Layer
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.fp8 import product
from paxcli.layers.init import Init, Xavier
from paxcli.layers.shared_weights import add_bias
from paxcli.mesh.sharding import constrain

_AXES = {"w": ("embed", "vocab"), "b": ("vocab",)}


class Scorer(NamedTuple):
    """An output head as a function, for a loss that computes logits and their gradients in chunks of tokens.

    Attributes:
      score: `(params, x) -> logits`, [B, T, D] to [B, T, V].
      params: The arrays that it reads.
      axes: The logical axes of these, and perhaps of others.
    """

    score: Callable[[dict[str, Any], jax.Array], jax.Array]
    params: dict[str, Any]
    axes: Mapping[str, tuple[str, ...]]


class Head(Layer):
    """Base of the output heads, tied to the embedding or not.

    Attributes:
      vocab_size: V.
      model_dims: D.
      use_bias: Whether each token's logit has a bias.
      logit_cap: `cap * tanh(logit / cap)` (soft cap); None = off.
    """

    vocab_size: PositiveInt
    model_dims: PositiveInt
    use_bias: bool = False
    logit_cap: PositiveFloat | None = None

    def matmul_flops(self, *shape: int) -> Flops | None:
        """FLOPs of the logits; looking embeddings up is not a matmul."""
        return matrix_flops(shape, self.model_dims * self.vocab_size)

    def logits(self, x: HiddenStates) -> Float[jax.Array, "B T V"]:
        """Scores every token of the vocabulary."""
        scorer = self.scorer()
        return scorer.score(scorer.params, x)

    def scorer(self) -> Scorer:
        """The function and parameters of `logits`, for a loss that scores tokens in chunks."""
        raise NotImplementedError


class OutputHead(Head):
    """Logits `x @ w (+ b)`, optionally soft-capped (untied head; Pax: `FullSoftmax`).

    Attributes:
      params_init: Initializer of `w` [D, V].
    """

    params_init: Init = Xavier()

    def setup(self) -> None:
        shape = (self.model_dims, self.vocab_size)
        self.w = self.weight("w", self.params_init, shape, _AXES["w"], contracts=(0,), produces=(1,), any_order=True)
        if self.use_bias:
            self.b = self.zero_weight("b", (self.vocab_size,), _AXES["b"])

    def scorer(self) -> Scorer:
        params = {"w": self.w} | ({"b": self.b} if self.use_bias else {})
        return Scorer(functools.partial(_score, logit_cap=self.logit_cap), params, _AXES)


def _score(params: dict[str, Any], x: jax.Array, logit_cap: float | None) -> jax.Array:
    return finish_logits(product(None)("btd,dv->btv", x, params["w"]), params.get("b"), logit_cap)


def finish_logits(
    logits: Float[jax.Array, "B T V"], bias: Float[jax.Array, " V"] | None, logit_cap: float | None
) -> Float[jax.Array, "B T V"]:
    """Completes the logits of a head: adds the bias, caps and shards them."""
    logits = soft_cap(add_bias(logits, bias), logit_cap)
    return constrain(logits, "activation_batch", "activation_length", "activation_vocab")
