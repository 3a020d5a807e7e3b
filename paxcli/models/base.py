"""What the training step asks of a model."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from paxcli.inputs.nested_map import NestedMap
from paxcli.layers.base import Layer
from paxcli.models.losses import WeightedScalars


class Model(Layer):
    """A network with its loss (Pax: `praxis.base_model.BaseModel`).

    Attributes:
      fprop_dtype: Type of activations, and of the parameters while they are used; parameters are kept in float32.
    """

    fprop_dtype: Literal["float32", "bfloat16"] = "float32"

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """The forward pass: whatever `compute_loss` needs."""
        raise NotImplementedError

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        """Metrics, `loss` among them, and arrays with one entry an example, leading dimension B."""
        raise NotImplementedError

    def __call__(self, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        return self.compute_loss(self.compute_predictions(batch), batch)

    def cast(self, params: dict) -> dict:
        """Parameters in `fprop_dtype`, for one forward and backward pass."""
        dtype = jnp.dtype(self.fprop_dtype)
        return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
