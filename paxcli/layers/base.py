"""Base classes of layers: configs, weights that declare their axes, FLOPs, stacks and decode caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import flax.linen as nn
import jax
from jaxtyping import Float, Int

from paxcli.config.configurable import Configurable
from paxcli.errors import ConfigError
from paxcli.layers.activations import dropout
from paxcli.layers.flops import Flops
from paxcli.layers.init import Init, Initializer
from paxcli.layers.lora import A, AdaptedWeight, Lora, active_lora, adapter_arrays, kaiming_uniform
from paxcli.layers.matmul import OutputFirst
from paxcli.mesh.weights import Weight, WeightBox

if TYPE_CHECKING:
    from paxcli.layers.stack import Stack

HiddenStates = Float[jax.Array, "B T D"]  # the features of each token
Ids = Int[jax.Array, "B T"]  # an integer of each token: its id, its segment's, its position
SourceIds = Int[jax.Array, "B S"]  # likewise, of the tokens of a source
Axes = tuple[str | None, ...]  # the logical axis of each dimension, from `mesh/rules.py`, or None
Cache = Any  # a decode cache: a pytree of arrays whose structure is its layer's own
Visibility = Literal["segment", "prefix", "row"]
# Name of a weight that `Model.cast` leaves in float32: the choice of experts depends on small differences.
BALANCE_BIAS = "balance_bias"


class Layer(Configurable, nn.Module):
    """A Flax module with `.config()` and `.partial()`.

    A layer computes in the dtype of its parameters: the training step casts them once, to `fprop_dtype`.

    `matmul_flops` and `stacks` need only the layer's fields: they also work on a layer made with `parent=None`, without
    parameters. A layer that holds others makes them the same way to ask them.

    Attributes:
      decode_fields: Fields that have another value in decoding. They change no parameter.
    """

    has_kinds = True
    decode_fields: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        for name, method in vars(cls).items():
            # Flax wraps the methods of every class: an override of one that `nn.nowrap` marks needs the mark as well.
            if any(hasattr(vars(base).get(name), "nowrap") for base in cls.__mro__[1:]):
                nn.nowrap(method)
        super().__init_subclass__(**kwargs)

    def weight(
        self,
        name: str,
        init: Init | Initializer,
        shape: tuple[int, ...],
        axes: Axes,
        contracts: tuple[int, ...] = (),
        produces: tuple[int, ...] = (),
        fused: int = 1,
        group: str | None = None,
        factored: bool = False,
        factor: float = 1.0,
        any_order: bool = False,
    ) -> Any:
        """A float32 parameter [*shape], with its adapter added if the model's `lora` targets it.

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
          factored: Whether to return an adapted weight as an `AdaptedWeight`, which `product` takes.
          factor: Multiplies the initial values of an `Init`.
          any_order: Whether to return an `OutputFirst` if the weight is stored as one; so does `factored`.
        """
        scale = None
        if isinstance(init, Init):
            scale, draw = init.scale(shape, contracts, produces, fused), init.weight(contracts, produces, fused)
            scale, init = scale and factor * scale, lambda *args: factor * draw(*args)
        any_order = any_order or factored
        facts = Weight(axes, contracts, produces, group=group, init_scale=scale, any_order=any_order)
        w = self._declare(name, init, shape, facts)
        lora = active_lora.get()
        if lora is None or not contracts:
            return w
        path = "/".join((*self.path, name))
        if not (re.search(lora.targets, path) if self.is_initializing() else self.has_variable("params", name + A)):
            return w
        if lora.dropout and not factored:
            raise ConfigError(f"`lora.dropout` does not apply to {path}.", "Set it to 0, or change `lora.targets`.")
        adapted = self._adapt(name, w, facts, lora)
        return adapted if factored else adapted.merge()

    def zero_weight(self, name: str, shape: tuple[int, ...], axes: Axes, group: str | None = None) -> Any:
        """A `weight` that is initially 0, such as a bias."""
        return self.weight(name, nn.initializers.zeros, shape, axes, group=group)

    def _adapt(self, name: str, w: jax.Array, facts: Weight, lora: Lora) -> AdaptedWeight:
        arrays = []
        for suffix, (shape, of_adapter) in adapter_arrays(facts, w.shape, lora).items():
            init = kaiming_uniform(of_adapter) if suffix == A else nn.initializers.zeros
            arrays.append(self._declare(name + suffix, init, shape, of_adapter))

        return AdaptedWeight(facts, lora.scale, w, *arrays, dropout=dropout(self, lora.dropout))

    def lookup_table(self, name: str, init: Init, shape: tuple[int, int], axes: Axes) -> jax.Array:
        """A float32 table [rows, features] whose rows are looked up by ids."""
        facts = Weight(axes, (0,), (1,), is_table=True, init_scale=init.table_scale(shape[1]))
        return self._declare(name, init.table(shape[1]), shape, facts)

    def _declare(self, name: str, init: Initializer, shape: tuple[int, ...], facts: Weight) -> Any:
        if isinstance(stored := self.get_variable("params", name), OutputFirst):
            return stored
        return nn.meta.unbox(self.param(name, lambda *args: WeightBox(init(*args), facts.axes, weight=facts), shape))

    @nn.nowrap
    def named_fields(self, *names: str) -> dict[str, Any]:
        """The values of these fields, such as those that a layer passes on to others."""
        return {name: getattr(self, name) for name in names}

    @nn.nowrap
    def matmul_flops(self, *shape: int) -> Flops | None:
        """Matmul FLOPs of one forward pass; None = unknown, so that the MFU of the model is unknown too.

        A subclass that overrides `__call__` has to define this as well: what it inherits does not count.

        Args:
          *shape: Leading dimensions of the input, without features: (B, T) of tokens; (B, T, S) where S source tokens
            are read as well; (B, height, width) of images.
        """
        return None

    @nn.nowrap
    def stacks(self) -> Mapping[str, Stack]:
        """The stacks of blocks inside, by their path of fields, such as `stack` or `network.stack`."""
        return {}


class Norm(Layer):
    """Normalizes the features of each token."""


class Positions(Layer):
    """Gives each position a vector, to be added to the embedding of its token."""


class FeedForwardLayer(Layer):
    """The part of a transformer block that computes each token by itself."""


class CachedLayer(Layer):
    """A layer that can decode token by token with a cache: attention, and blocks and stacks of it.

    It is called with a cache and returns the updated one; without a cache it gets and returns None.
    """

    has_kinds = True

    @property
    def visibility(self) -> Visibility:
        """Tokens that a position sees: those before it in its `segment` or its `row`, or also a `prefix` ahead of it.

        Negative segment ids mark a prefix, which its segment sees (prefix-LM).
        """
        return "segment"

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
        """An empty decode cache (KV cache) for `length` tokens in each of `batch_size` rows: any pytree of arrays.

        Raises:
          ConfigError: With these fields the layer cannot decode.
        """
        raise NotImplementedError


class SelfAttention(CachedLayer):
    """The part of a transformer block in which tokens see each other."""


class Block(CachedLayer):
    """One layer of a transformer."""


class LayerStack(CachedLayer):
    """The layers of a transformer, in order."""


def flops_of(layer: nn.Module, *shape: int) -> Flops | None:
    """`Layer.matmul_flops`; None for a module that does not define it for its `__call__`."""
    if not isinstance(layer, Layer):
        return None
    declares = next(cls for cls in type(layer).__mro__ if "matmul_flops" in vars(cls))
    calls = next((cls for cls in type(layer).__mro__ if "__call__" in vars(cls)), declares)
    return layer.matmul_flops(*shape) if issubclass(declares, calls) else None


def visibility_of(layer: nn.Module) -> Visibility:
    """`CachedLayer.visibility`; `segment` for any other module."""
    return layer.visibility if isinstance(layer, CachedLayer) else "segment"


def cache_of(layer: nn.Module, batch_size: int, length: int, dtype: jax.typing.DTypeLike) -> Cache:
    """`CachedLayer.init_cache`.

    Raises:
      ConfigError: The layer has no decode cache.
    """
    if isinstance(layer, CachedLayer):
        return layer.init_cache(batch_size, length, dtype)
    hint = "Derive it from `paxcli.layers.base.CachedLayer` and define `init_cache`."
    raise ConfigError(f"{type(layer).__name__} has no decode cache, so a model that holds it cannot decode.", hint)
