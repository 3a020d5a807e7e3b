"""Differentially private gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from paxcli.config.configurable import Configurable
from paxcli.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt
from paxcli.errors import ConfigError
from paxcli.mesh.sharding import vmap_along


@dataclasses.dataclass(frozen=True)
class DpSgd(Configurable):
    """Clips the gradient of each example, and adds noise to their mean: DP-SGD (Abadi et al., 2016).

    Memory holds the gradients of all examples of a microbatch (`Train.num_microbatches`) at once. The loss of an
    example is the mean over its tokens. Pax: `DpSgdStochasticGradient`, `MicrobatchDpSgdStochasticGradient`.

    Attributes:
      l2_norm_clip: Largest L2 norm of the gradient of an example.
      noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, divided by `l2_norm_clip`.
      microbatch_size: Examples that are clipped together: the gradient of their mean loss.
      normalize_gradients: Whether to divide the gradient by `l2_norm_clip` (De et al., 2022).
    """

    pax_name = "DpSgdStochasticGradient"

    l2_norm_clip: PositiveFloat = 1.0
    noise_multiplier: NonNegativeFloat = 0.0
    microbatch_size: PositiveInt = 1
    normalize_gradients: bool = False

    def clip_examples(self, of_rows: Callable) -> Callable:
        """Wraps `of_rows` to clip each example's gradient; the result returns their mean, with weight 1.

        Args:
          of_rows: Rows → maxima, activations, gradients, metrics as (value, weight), and the weight of the gradients.
            Activations are left out.
        """

        def of_group(rows: Any) -> Any:
            maxima, _, grads, metrics, _ = of_rows(rows)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            scale = 1 / jnp.maximum(1.0, optax.tree.norm(grads) / self.l2_norm_clip)
            sums = {name: (value * weight, weight) for name, (value, weight) in metrics.items()}
            return maxima, jax.tree.map(lambda g: scale * g, grads), sums

        def of_slice(rows: Any) -> Any:
            groups = jax.tree.map(lambda x: x.reshape(-1, self.microbatch_size, *x.shape[1:]), rows)
            try:
                maxima, grads, sums = vmap_along("activation_microbatch", of_group)(groups)
            except NotImplementedError as error:
                hint = "Experts need a `capacity_factor`: dropless ones have no gradients by example."
                raise ConfigError(f"DP-SGD: a layer has no gradients by example: {error}.", hint) from None
            sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
            metrics = {name: (total / jnp.maximum(weight, 1e-6), weight) for name, (total, weight) in sums.items()}
            means = jax.tree.map(lambda g: jnp.mean(g, axis=0), grads)
            return jax.tree.map(lambda x: jnp.max(x, axis=0), maxima), {}, means, metrics, jnp.float32(1.0)

        return of_slice

    def add_noise(self, grads: Any, num_examples: int, key: jax.Array) -> Any:
        """The mean of the clipped gradients of `num_examples` examples, with noise and normalized."""
        stddev = self.noise_multiplier * self.l2_norm_clip * self.microbatch_size / num_examples
        unit = self.l2_norm_clip if self.normalize_gradients else 1.0
        keys = optax.tree.split_key_like(key, grads)
        return jax.tree.map(lambda g, k: (g + stddev * jax.random.normal(k, g.shape)) / unit, grads, keys)
