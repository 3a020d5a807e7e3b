"""A feed-forward layer of many experts, of which each token passes a few."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import PositiveFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.activations import ActivationName, activation
from paxcli.layers.base import Layer
from paxcli.layers.expert_dispatch import Experts, Routing, dropless, with_capacity
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import save_as
from paxcli.mesh.sharding import constrain


class MoeFeedForward(Layer):
    """Mixture of experts (Shazeer et al., 2017): of E feed-forward layers without biases, the `k` likeliest of a token.

    A linear router and a softmax, in float32, give each expert a probability; a token's result is the mean of its
    experts' by these. Experts lie on the mesh axis `expert`. Each layer reports `load_balance_loss` among the model's
    metrics (Fedus et al., 2021), the mean over rows of `E * sum(share of tokens * mean probability)`, which is `k` if
    all experts are used alike and grows to `E`. It is no part of the loss until `task.loss_aggregator` names it.
    Padding is routed and counted as tokens are; at the end of a row it takes no place from them.

    Attributes:
      model_dims: D.
      hidden_dims: F, of one expert.
      num_experts: E.
      num_experts_per_token: k.
      capacity_factor: An expert takes `ceil(T * k / E) * capacity_factor` choices of a row of T tokens, the earliest;
        the others add nothing (Lepikhin et al., 2020). None = all: no token is dropped.
      normalize_weights: Whether the probabilities of a token's experts are divided by their sum.
      activation: Name of the activation.
      gated: Whether a second projection, activated, gates the first.
      params_init: How the matrices start.
    """

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_experts: PositiveInt = 8
    num_experts_per_token: PositiveInt = 2
    capacity_factor: PositiveFloat | None = None
    normalize_weights: bool = True
    activation: ActivationName = "silu"
    gated: bool = True
    params_init: Init = Xavier()

    def setup(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token={self.num_experts_per_token} is more than num_experts={self.num_experts}."
            )
        experts, dims, hidden = self.num_experts, self.model_dims, self.hidden_dims
        init = self.params_init
        self.router = self.weight("router", init, (dims, experts), ("embed", None), contracts=(0,), produces=(1,))
        weight = functools.partial(self.weight, init=init, contracts=(1,), produces=(2,))
        wide, wide_axes = (experts, dims, hidden), ("expert", "embed", "mlp")
        self.w_gate = weight("w_gate", shape=wide, axes=wide_axes) if self.gated else None
        self.w_in = weight("w_in", shape=wide, axes=wide_axes)
        self.w_out = weight("w_out", shape=(experts, hidden, dims), axes=("expert", "mlp", "embed"))

    def __call__(self, x: Float[jax.Array, "B T D"]) -> Float[jax.Array, "B T D"]:
        experts = Experts(self.w_gate, self.w_in, self.w_out)
        routing, act = self._routing(x), activation(self.activation)
        if self.capacity_factor is None:
            y = dropless(x, routing, experts, act)
        else:
            fair_share = -(-x.shape[1] * self.num_experts_per_token // self.num_experts)
            capacity = min(max(int(fair_share * self.capacity_factor), 1), x.shape[1])
            y = with_capacity(x, routing, experts, act, capacity)
        return save_as("feed_forward_out", constrain(y, "activation_batch", "activation_length", "activation_embed"))

    def _routing(self, x: jax.Array) -> Routing:
        """Chosen experts and their weights, which are reported, too."""
        logits = jnp.einsum("btd,de->bte", x, self.router, preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(constrain(logits, "activation_batch", "activation_length", None), axis=-1)
        # Not `top_k`: XLA collects its rows on every device, and those of a sort it does not.
        chosen = jnp.argsort(-probabilities, axis=-1)[..., : self.num_experts_per_token]
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        share = jnp.mean(jnp.sum(jax.nn.one_hot(chosen, self.num_experts), axis=2), axis=1)
        balance = self.num_experts * jnp.sum(share * jnp.mean(probabilities, axis=1), axis=-1)
        self.sow("metrics", "load_balance_loss", jnp.mean(balance))
        if self.normalize_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(chosen, weights.astype(x.dtype))
