"""What every layer shares: configs, and parameters that say what their dimensions mean."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax

from paxcli.config.configurable import Configurable


class Layer(Configurable, nn.Module):
    """A Flax module with `.config()` and `.partial()`.

    A layer computes in the type of the parameters it is given: the training step casts them once, to `fprop_dtype`.
    """

    def weight(
        self, name: str, init: Callable[..., jax.Array], shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> jax.Array:
        """A float32 parameter; `axes` names each dimension with a logical axis of `mesh/rules.py`, or None."""
        return nn.meta.unbox(self.param(name, nn.with_logical_partitioning(init, axes), shape))
