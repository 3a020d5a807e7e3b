"""Multi-layer perceptron (MLP)."""

from __future__ import annotations

import itertools

import jax
from jaxtyping import Float

from paxcli.config.fields import LayerCount, PositiveInt
from paxcli.layers.activations import ActivationName, activation
from paxcli.layers.base import Layer
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.linear import Linear
from paxcli.mesh.sharding import constrain


class Mlp(Layer):
    """`num_layers` fully connected layers `act(x @ w + b)` (Pax: `praxis.layers.MLPBlock`).

    Attributes:
      input_dims: Size of the last dimension of the input.
      output_dims: Size of the last dimension of the output.
      hidden_dims: F, the width of all layers but the last.
      num_layers: Number of matrices, at least 1.
      activation: Name of the activation.
      activate_final: Whether the last layer has it too.
      params_init: Initializer of the matrices.
    """

    input_dims: PositiveInt
    output_dims: PositiveInt
    hidden_dims: PositiveInt
    num_layers: LayerCount = 3
    activation: ActivationName = "relu"
    activate_final: bool = False
    params_init: Init = Xavier()

    def setup(self) -> None:
        self.layers = [Linear(*shape, use_bias=True, params_init=self.params_init) for shape in self._shapes]

    def matmul_flops(self, *shape: int) -> Flops | None:
        return matrix_flops(shape, sum(before * after for before, after in self._shapes))

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """Shapes of the matrices."""
        widths = [self.input_dims, *[self.hidden_dims] * (self.num_layers - 1), self.output_dims]
        return list(itertools.pairwise(widths))

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch F"]:
        act = activation(self.activation)
        axes = ("activation_batch", *[None] * (x.ndim - 2), "activation_embed")
        for number, layer in enumerate(self.layers):
            x = layer(constrain(x, *axes))
            x = act(x) if number + 1 < self.num_layers or self.activate_final else x
        return constrain(x, *axes)
