"""A mixture-of-experts (MoE) feed-forward layer: a router sends each token to a few of many experts."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import PositiveFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.layers.activations import ActivationName
from paxcli.layers.base import BALANCE_BIAS, FeedForwardLayer, HiddenStates, flops_of
from paxcli.layers.expert_dispatch import Experts, Routing, dropless, with_capacity
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.flops import Flops, matrix_flops, sum_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import save_as
from paxcli.mesh.sharding import constrain

# Of a balance bias: far below the gradients of other parameters, so that it takes no part in clipping by their norm.
_BALANCE_GRADIENT = 1e-6


class MoeFeedForward(FeedForwardLayer):
    """Mixture of experts (Shazeer et al., 2017): each token passes its top `k` of E feed-forward layers.

    A linear router and a softmax, in float32, give each expert a score; the output is the sum of the chosen experts'
    outputs, weighted by these. Experts are sharded over the mesh axis `expert` (expert parallel). Each layer
    reports the metric `load_balance_loss` (Fedus et al., 2021), the mean over rows of `E * sum(share of tokens * mean
    probability)`, which is `k` for perfect balance and at most `E`. To train on it, name it in `task.loss_aggregator`.
    Padding is routed and counted like tokens; at the end of a row it takes no capacity from them.

    Attributes:
      model_dims: D.
      hidden_dims: F, of one expert unless `expert_dims` is set.
      num_experts: E.
      num_experts_per_token: k.
      capacity_factor: Expert capacity: each expert takes the first `ceil(T * k / E) * capacity_factor` choices of a row
        of T tokens and drops the others, which add 0 (Lepikhin et al., 2020). None = dropless, as decoding always is.
      normalize_weights: Whether the scores of a token's experts are divided by their sum.
      activation: Name of the activation.
      gated: Whether a second projection, with the activation, gates the first (SwiGLU with `silu`).
      params_init: Initializer of the matrices.
      expert_dims: F of one expert, where the model's other feed-forward layers have another; None = `hidden_dims`.
      use_bias: Whether the experts and the router have biases.
      scoring: How the router's logits become scores.
      weights_scale: Factor of the chosen experts' weights.
      num_groups: Groups of experts, a divisor of E (DeepSeek-AI, 2024, section 2.2.2).
      groups_per_token: Groups whose experts a token may choose.
      group_score_experts: The score of a group is the sum of this many of its highest scores.
      balance_bias: Whether a bias of each expert is added to its score for the choice, not for its weight
        (loss-free balancing: Wang et al., 2024). Its gradient is not the loss's: the sign of the expert's excess load,
        times 1e-6. So AdamW moves it by about the learning rate, and less where the epsilon is not far below 1e-6,
        or where clipping scales the gradients down. It stays in float32.
      shared_dims: F of a feed-forward layer that all tokens pass, in addition (shared experts); None = off.
      shared_gate: Whether its output is multiplied by the sigmoid of a linear function of the token.
      scale_inputs: Whether the weights of a token's experts multiply their inputs, instead of their outputs (Llama 4).
    """

    # What experts with a capacity drop depends on the length that a prompt is padded to.
    decode_fields: ClassVar[dict[str, Any]] = {"capacity_factor": None}

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    num_experts: PositiveInt = 8
    num_experts_per_token: PositiveInt = 2
    capacity_factor: PositiveFloat | None = None
    normalize_weights: bool = True
    activation: ActivationName = "silu"
    gated: bool = True
    params_init: Init = Xavier()
    expert_dims: PositiveInt | None = None
    use_bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weights_scale: PositiveFloat = 1.0
    num_groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1
    group_score_experts: PositiveInt = 1
    balance_bias: bool = False
    shared_dims: PositiveInt | None = None
    shared_gate: bool = False
    scale_inputs: bool = False

    def setup(self) -> None:
        experts, chosen, groups = self.num_experts, self.num_experts_per_token, self.num_groups
        if chosen > experts:
            hint = "Lower `num_experts_per_token`."
            raise ConfigError(f"num_experts_per_token={chosen} is more than num_experts={experts}.", hint)
        if experts % groups or chosen > experts // groups * self.groups_per_token:
            grouping = f"num_groups={groups} of num_experts={experts}, groups_per_token={self.groups_per_token}"
            hint = "`num_groups` divides `num_experts`, and the groups of a token hold all its experts."
            raise ConfigError(f"{grouping} and num_experts_per_token={chosen} do not fit together.", hint)
        dims, hidden, init = self.model_dims, self._expert_dims, self.params_init
        self.router = self.weight("router", init, (dims, experts), ("embed", None), contracts=(0,), produces=(1,))
        weight = functools.partial(self.weight, init=init, contracts=(1,), produces=(2,))
        wide, wide_axes = (experts, dims, hidden), ("expert", "embed", "mlp")
        self.w_gate = weight("w_gate", shape=wide, axes=wide_axes) if self.gated else None
        self.w_in = weight("w_in", shape=wide, axes=wide_axes)
        self.w_out = weight("w_out", shape=(experts, hidden, dims), axes=("expert", "mlp", "embed"))
        if self.use_bias:
            self.router_bias = self.zero_weight("router_bias", (experts,), ("norm",))
            self.b_gate = self.zero_weight("b_gate", (experts, hidden), ("expert", "mlp")) if self.gated else None
            self.b_in = self.zero_weight("b_in", (experts, hidden), ("expert", "mlp"))
            self.b_out = self.zero_weight("b_out", (experts, dims), ("expert", None))
        if self.balance_bias:
            self.balance = self.zero_weight(BALANCE_BIAS, (experts,), ("norm",))
        if self.shared_dims is not None:
            self._shared = self._shared_template(name="shared")
            if self.shared_gate:
                self.gate = self.weight("shared_gate", init, (dims, 1), ("embed", None), contracts=(0,), produces=(1,))
        elif self.shared_gate:
            raise ConfigError("shared_gate=true has no effect without `shared_dims`.", "Set both, or neither.")

    def matmul_flops(self, *shape: int) -> Flops | None:
        """FLOPs of the router, of k experts per token, as if dropless, and of the shared experts."""
        expert = self.model_dims * self._expert_dims * (3 if self.gated else 2)
        routed = matrix_flops(shape, self.model_dims * self.num_experts + self.num_experts_per_token * expert)
        if self.shared_dims is None:
            return routed
        gate = matrix_flops(shape, self.model_dims * self.shared_gate)
        return sum_flops((routed, gate, flops_of(self._shared_template(parent=None), *shape)))

    def __call__(self, x: HiddenStates) -> HiddenStates:
        biases = (self.b_gate, self.b_in, self.b_out) if self.use_bias else ()
        experts = Experts(self.w_gate, self.w_in, self.w_out, *biases)
        routing, act, tokens = self._routing(x), self.activation, x
        if self.scale_inputs:  # each choice is a token of its own, with one expert
            chosen, weights = (choices.reshape(len(x), -1, 1) for choices in routing)
            tokens = jnp.repeat(x, self.num_experts_per_token, axis=1) * weights
            routing = Routing(chosen, jnp.ones_like(weights))
        if self.capacity_factor is None:
            y = dropless(tokens, routing, experts, act)
        else:
            fair_share = -(-x.shape[1] * self.num_experts_per_token // self.num_experts)
            capacity = min(max(int(fair_share * self.capacity_factor), 1), x.shape[1])
            y = with_capacity(tokens, routing, experts, act, capacity)
        if self.scale_inputs:
            y = jnp.sum(y.reshape(*x.shape[:2], -1, x.shape[2]), axis=2)
        if self.shared_dims is not None:
            shared = self._shared(x)
            y = y + (shared * jax.nn.sigmoid(jnp.einsum("btd,do->bto", x, self.gate)) if self.shared_gate else shared)
        return save_as("feed_forward_out", constrain(y, "activation_batch", "activation_length", "activation_embed"))

    @property
    def _expert_dims(self) -> int:
        return self.expert_dims or self.hidden_dims

    @property
    def _shared_template(self) -> functools.partial:
        same = self.named_fields("model_dims", "activation", "gated", "use_bias", "params_init")
        return functools.partial(FeedForward, hidden_dims=self.shared_dims, **same)

    def _routing(self, x: jax.Array) -> Routing:
        """Chosen experts and their weights; also reports the balance."""
        logits = jnp.einsum("btd,de->bte", x, self.router, preferred_element_type=jnp.float32)
        logits = logits + self.router_bias if self.use_bias else logits
        logits = constrain(logits, "activation_batch", "activation_length", None)
        scores = jax.nn.softmax(logits, axis=-1) if self.scoring == "softmax" else jax.nn.sigmoid(logits)
        # Not `top_k`: XLA gathers its rows on every device, and does not do so for a sort.
        chosen = jnp.argsort(-self._preference(scores), axis=-1)[..., : self.num_experts_per_token]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        share = jnp.mean(jnp.sum(jax.nn.one_hot(chosen, self.num_experts), axis=2), axis=1)
        if self.scoring != "softmax":
            scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
        balance = self.num_experts * jnp.sum(share * jnp.mean(scores, axis=1), axis=-1)
        self.sow("metrics", "load_balance_loss", jnp.mean(balance))
        if self.normalize_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights * self.weights_scale
        if self.balance_bias:
            load = jnp.mean(share, axis=0)
            weights = _steer(weights, self.balance, (load - jnp.mean(load)).astype(self.balance.dtype))
        return Routing(chosen, weights.astype(x.dtype))

    def _preference(self, scores: Float[jax.Array, "B T E"]) -> Float[jax.Array, "B T E"]:
        """Scores for the choice of experts: with the balance bias, and -inf outside the token's groups."""
        preference = scores + self.balance if self.balance_bias else scores
        if self.num_groups == 1:
            return preference
        grouped = preference.reshape(*scores.shape[:2], self.num_groups, -1)
        of_group = jnp.sum(jnp.sort(grouped, axis=-1)[..., -self.group_score_experts :], axis=-1)
        groups = jnp.argsort(-of_group, axis=-1)[..., : self.groups_per_token]
        is_open = jnp.any(jax.nn.one_hot(groups, self.num_groups, dtype=bool), axis=-2)
        return jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(scores.shape)


@jax.custom_vjp
def _steer(
    weights: Float[jax.Array, "B T k"], bias: Float[jax.Array, " E"], excess: Float[jax.Array, " E"]
) -> Float[jax.Array, "B T k"]:
    """`weights`; the gradient with respect to `bias` is the sign of the excess load of each expert, scaled."""
    return weights


_steer.defvjp(
    lambda weights, bias, excess: (weights, excess),
    # Without a gradient, these tokens have no loss, as in the bubbles of a pipeline.
    lambda excess, grad: (grad, jnp.any(grad != 0) * (_BALANCE_GRADIENT * jnp.sign(excess)), None),
)
