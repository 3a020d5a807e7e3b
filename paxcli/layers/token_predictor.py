"""Multi-token prediction: one more layer that predicts a token further ahead."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from paxcli.config.fields import PositiveInt
from paxcli.layers.base import HiddenStates, Ids, Layer, flops_of
from paxcli.layers.block import as_matmul_input
from paxcli.layers.flops import Flops, sum_flops
from paxcli.layers.init import Init, Xavier
from paxcli.layers.linear import Linear


class TokenPredictor(Layer):
    """Joins hidden states with the embeddings of the tokens that they predict, and runs a layer on that.

    Source: DeepSeek-V3, 2024, section 2.2, equations 21 and 22 (MaxText: `MultiTokenPredictionLayer`).

    Attributes:
      model_dims: D.
      stack: Template of the layer, a stack of one.
      norm: Template of the norms of hidden states and embeddings.
      params_init: Initializer of the projection.
    """

    model_dims: PositiveInt
    stack: functools.partial
    norm: functools.partial
    params_init: Init = Xavier()

    def setup(self) -> None:
        self._hidden_norm = self.norm(name="hidden_norm", dims=self.model_dims)
        self._embedding_norm = self.norm(name="embedding_norm", dims=self.model_dims)
        self._projection = self._projection_template(name="projection")
        self._stack = self.stack(name="stack")

    @property
    def _projection_template(self) -> functools.partial:
        sizes = dict(input_dims=2 * self.model_dims, output_dims=self.model_dims, output_axis=None)
        return functools.partial(Linear, params_init=self.params_init, **sizes)

    def matmul_flops(self, *shape: int) -> Flops | None:
        return sum_flops(flops_of(part(parent=None), *shape) for part in (self._projection_template, self.stack))

    def __call__(self, x: HiddenStates, embedded: HiddenStates, segment_ids: Ids, segment_pos: Ids) -> HiddenStates:
        """Hidden states of the next prediction.

        Args:
          x: Hidden states of the last one, from which a token is predicted.
          embedded: The embedding of that token.
          segment_ids: Those of `x`.
          segment_pos: Likewise.
        """
        joined = jnp.concatenate([self._embedding_norm(embedded), self._hidden_norm(x)], axis=-1).astype(x.dtype)
        return self._stack(self._projection(as_matmul_input(joined)), None, segment_ids, segment_pos)[0]
