"""Linear projection of the last dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float

from paxcli.config.fields import PositiveInt
from paxcli.layers.base import Layer
from paxcli.layers.flops import Flops, matrix_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.shared_weights import add_bias


class Linear(Layer):
    """`y = x @ w (+ b)` (Pax: `praxis.layers.Linear`, `FeedForward` without activation).

    Attributes:
      input_dims: Size of the last dimension of the input.
      output_dims: Size of the last dimension of the output.
      use_bias: Whether to add a bias, initially 0.
      input_axis: Logical axis of the input dimension of `w` [input_dims, output_dims].
      output_axis: Logical axis of its output dimension.
      params_init: Initializer of `w`.
    """

    input_dims: PositiveInt
    output_dims: PositiveInt
    use_bias: bool = False
    input_axis: str | None = "embed"
    output_axis: str | None = "mlp"
    params_init: Init = Xavier()

    def setup(self) -> None:
        shape, axes = (self.input_dims, self.output_dims), (self.input_axis, self.output_axis)
        self.w = self.weight("w", self.params_init, shape, axes, contracts=(0,), produces=(1,))
        self.b = self.zero_weight("b", (self.output_dims,), (self.output_axis,)) if self.use_bias else None

    def matmul_flops(self, *shape: int) -> Flops | None:
        return matrix_flops(shape, self.input_dims * self.output_dims)

    def __call__(self, x: Float[jax.Array, "*batch D"]) -> Float[jax.Array, "*batch F"]:
        return add_bias(jnp.dot(x, self.w), self.b)
