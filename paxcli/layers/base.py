"""The base class of layers: configs, and parameters that declare what their dimensions mean."""

from __future__ import annotations

import flax.linen as nn
import jax

from paxcli.config.configurable import Configurable
from paxcli.layers.init import Init, Initializer
from paxcli.mesh.weights import Weight, WeightBox


class Layer(Configurable, nn.Module):
    """A Flax module with `.config()` and `.partial()`.

    A layer computes in the dtype of its parameters: the training step casts them once, to `fprop_dtype`.
    """

    def weight(
        self,
        name: str,
        init: Init | Initializer,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        contracts: tuple[int, ...] = (),
        produces: tuple[int, ...] = (),
        fused: int = 1,
        group: str | None = None,
    ) -> jax.Array:
        """A float32 parameter.

        The dimensions that a matmul with the activations contracts and produces decide the fan-in and fan-out of the
        initializer, whether the weight decays (scales and biases, which contract nothing, do not by default), and how
        optimizers such as Muon see it as a matrix.

        Args:
          name: Name of the parameter.
          init: An `Init`, which reads `contracts` and `produces`, or a JAX initializer `(key, shape, dtype) -> array`.
          shape: Its shape.
          axes: The logical axis of each dimension, from `mesh/rules.py`, or None.
          contracts: The dimensions that the matmul sums over.
          produces: The dimensions of the matmul's result.
          fused: Number of weights of this shape that share one input and could be stored as one, for `init`: 3 for
            query, key and value.
          group: Weights of this layer with the same group count as one weight in statistics.
        """
        initializer = init.weight(contracts, produces, fused) if isinstance(init, Init) else init
        return self._declare(name, initializer, shape, Weight(axes, contracts, produces, group=group))

    def lookup_table(
        self, name: str, init: Init, shape: tuple[int, int], axes: tuple[str | None, str | None]
    ) -> jax.Array:
        """A float32 table [rows, features] whose rows are looked up by ids."""
        return self._declare(name, init.table(shape[1]), shape, Weight(axes, (0,), (1,), is_table=True))

    def _declare(self, name: str, init: Initializer, shape: tuple[int, ...], facts: Weight) -> jax.Array:
        def boxed(*args) -> WeightBox:
            return WeightBox(init(*args), facts.axes, weight=facts)

        return nn.meta.unbox(self.param(name, boxed, shape))
