"""A mixture-of-experts (MoE) feed-forward layer: a router sends each token to a few of many experts."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import PositiveFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.activations import ActivationName, activation
from paxcli.layers.base import Layer
from paxcli.layers.expert_dispatch import Experts, Routing, dropless, with_capacity
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import save_as
from paxcli.mesh.sharding import constrain


class MoeFeedForward(Layer):
    """Mixture of experts (Shazeer et al., 2017): each token passes its top `k` of E feed-forward layers without biases.

    A linear router and a softmax, in float32, give each expert a probability; the output is the mean of the chosen
    experts' outputs, weighted by these. Experts are sharded over the mesh axis `expert` (expert parallel). Each layer
    reports the metric `load_balance_loss` (Fedus et al., 2021), the mean over rows of `E * sum(share of tokens * mean
    probability)`, which is `k` for perfect balance and at most `E`. To train on it, name it in `task.loss_aggregator`.
    Padding is routed and counted like tokens; at the end of a row it takes no capacity from them.

    Attributes:
      model_dims: D.
      hidden_dims: F, of one expert.
      num_experts: E.
      num_experts_per_token: k.
      capacity_factor: Expert capacity: each expert takes the first `ceil(T * k / E) * capacity_factor` choices of a row
        of T tokens and drops the others, which add 0 (Lepikhin et al., 2020). None = dropless.
      normalize_weights: Whether the probabilities of a token's experts are divided by their sum.
      activation: Name of the activation.
      gated: Whether a second projection, with the activation, gates the first (SwiGLU with `silu`).
      params_init: Initializer of the matrices.
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

    @nn.nowrap
    def matmul_flops(self, *shape: int) -> Flops | None:
        """FLOPs of the router and of k experts per token, as if dropless."""
        expert = self.model_dims * self.hidden_dims * (3 if self.gated else 2)
        return matrix_flops(shape, self.model_dims * self.num_experts + self.num_experts_per_token * expert)

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
        """Chosen experts and their weights; also reports the balance."""
        logits = jnp.einsum("btd,de->bte", x, self.router, preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(constrain(logits, "activation_batch", "activation_length", None), axis=-1)
        # Not `top_k`: XLA gathers its rows on every device, and does not do so for a sort.
        chosen = jnp.argsort(-probabilities, axis=-1)[..., : self.num_experts_per_token]
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        share = jnp.mean(jnp.sum(jax.nn.one_hot(chosen, self.num_experts), axis=2), axis=1)
        balance = self.num_experts * jnp.sum(share * jnp.mean(probabilities, axis=1), axis=-1)
        self.sow("metrics", "load_balance_loss", jnp.mean(balance))
        if self.normalize_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(chosen, weights.astype(x.dtype))
