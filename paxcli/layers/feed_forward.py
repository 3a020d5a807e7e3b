"""The position-wise feed-forward layer: plain MLP, or gated as in SwiGLU and GeGLU."""

from __future__ import annotations

import functools

from paxcli.config.fields import DropoutRate, PositiveInt
from paxcli.layers.activations import ActivationName, activation, dropout, gate
from paxcli.layers.base import FeedForwardLayer, HiddenStates
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.fp8 import Precision, product
from paxcli.layers.init import Init, Xavier
from paxcli.layers.remat import save_as
from paxcli.layers.shared_weights import add_bias
from paxcli.mesh.sharding import constrain


class FeedForward(FeedForwardLayer):
    """`act(x @ w_in) @ w_out.T`, or gated: `(act(x @ w_gate) * (x @ w_in)) @ w_out.T` (Shazeer, 2020).

    Gated with `silu` it is SwiGLU, gated with `gelu` GeGLU. Pax: `praxis.layers.TransformerFeedForward` less its norm
    and residual, which the block has.

    Attributes:
      model_dims: D.
      hidden_dims: F.
      activation: Name of the activation.
      gated: Whether a second projection, with the activation, gates the first.
      use_bias: Whether `w_in` and `w_out` have biases.
      relu_dropout_prob: Share of the hidden activations, after the activation and the gate, that training drops.
      precision: `fp8` computes the matmuls in 8 bits in training; None = in the dtype of the activations.
      params_init: Initializer of the matrices.
    """

    model_dims: PositiveInt
    hidden_dims: PositiveInt
    activation: ActivationName = "gelu"
    gated: bool = False
    use_bias: bool = True
    relu_dropout_prob: DropoutRate = 0.0
    precision: Precision | None = None
    params_init: Init = Xavier()

    def setup(self) -> None:
        shape, axes = (self.model_dims, self.hidden_dims), ("embed", "mlp")
        matrix = functools.partial(self.weight, init=self.params_init, shape=shape, axes=axes, factored=True)
        if self.gated:
            self.w_gate = matrix("w_gate", contracts=(0,), produces=(1,))
            self.gate_product = product(self.precision)
        self.w_in = matrix("w_in", contracts=(0,), produces=(1,))
        # [D, F] like the others: XLA then runs the matmul of its gradient faster on a CPU.
        self.w_out = matrix("w_out", contracts=(1,), produces=(0,))
        self.b_in = self.zero_weight("b_in", (self.hidden_dims,), ("mlp",)) if self.use_bias else None
        self.b_out = self.zero_weight("b_out", (self.model_dims,), ("norm",)) if self.use_bias else None
        self.in_product, self.out_product = product(self.precision), product(self.precision)

    def matmul_flops(self, *shape: int) -> Flops | None:
        return matrix_flops(shape, self.model_dims * self.hidden_dims * (3 if self.gated else 2))

    def __call__(self, x: HiddenStates) -> HiddenStates:
        hidden = save_as("feed_forward_in", add_bias(self.in_product("btd,df->btf", x, self.w_in), self.b_in))
        if self.gated:
            gates = save_as("feed_forward_gate", self.gate_product("btd,df->btf", x, self.w_gate))
            hidden = gate(self.activation, gates, hidden)
        else:
            hidden = activation(self.activation)(hidden)
        hidden = dropout(self, self.relu_dropout_prob)(hidden)
        hidden = constrain(hidden, "activation_batch", "activation_length", "activation_mlp")
        y = add_bias(self.out_product("btf,df->btd", hidden, self.w_out), self.b_out)
        return save_as("feed_forward_out", constrain(y, "activation_batch", "activation_length", "activation_embed"))
