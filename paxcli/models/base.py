"""What the training step asks of a model."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from paxcli.layers.base import Layer
from paxcli.layers.fp8 import FP8_STATE
from paxcli.layers.scopes import CAST, LOSS
from paxcli.mesh.sharding import path_of
from paxcli.models.losses import WeightedScalars
from paxcli.nested_map import NestedMap


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

    def measured(
        self, params: dict, batch: NestedMap, key: jax.Array | None = None, fp8: Any = None
    ) -> tuple[WeightedScalars, NestedMap]:
        """What `compute_loss` returns, on parameters that are cast, and the metrics that layers report by themselves.

        Such a metric is the mean of all layers that have it, with the weight of the loss. It goes the way of Flax's
        `sow("metrics", name, value)`.

        Args:
          params: The parameters, as `cast` makes them.
          batch: The batch.
          key: Randomness of training; None in evaluation.
          fp8: State of the products in FP8 in training; None in evaluation, and without such products.
        """
        variables = {"params": params, FP8_STATE: fp8} if fp8 else {"params": params}
        rngs = None if key is None else {"dropout": key}
        (metrics, examples), reported = self.apply(variables, batch, rngs=rngs, mutable=["metrics"])
        found: dict[str, list[jax.Array]] = {}
        for path, values in jax.tree.leaves_with_path(reported.get("metrics", {})):
            *_, name, _ = path_of(path)  # the last is the number of the call
            found.setdefault(name, []).append(jnp.ravel(values))
        means = {name: jnp.mean(jnp.concatenate(values)) for name, values in found.items()}
        return metrics | {name: (mean, metrics["loss"][1]) for name, mean in means.items()}, examples

    def __call__(self, batch: NestedMap) -> tuple[WeightedScalars, NestedMap]:
        predictions = self.compute_predictions(batch)
        with jax.named_scope(LOSS):
            return self.compute_loss(predictions, batch)

    @jax.named_scope(CAST)
    def cast(self, params: dict) -> dict:
        """Parameters in `fprop_dtype`, for one forward and backward pass."""
        dtype = jnp.dtype(self.fprop_dtype)
        return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)
