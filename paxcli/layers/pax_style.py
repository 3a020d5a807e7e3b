"""Layers written in Pax's documented style: `class HParams(BaseHParams)`, `create_variable`, `create_child`, `fprop`.

For layers ported from Pax. pax's own layers are plain Flax; both kinds can contain each other.

    class Linear(BaseLayer):
        class HParams(BaseHParams):
            input_dims: int = 0
            output_dims: int = 0

        def setup(self):
            p = self.hparams
            self.create_variable("w", WeightHParams(shape=[p.input_dims, p.output_dims]))

        def fprop(self, x):
            return x @ self.theta.w

    config = Linear.HParams.config(input_dims=3, output_dims=4)   # an `fdl.Config`: a misspelt field raises at once
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp

from paxcli.config.configurable import part
from paxcli.errors import ConfigError
from paxcli.layers.base import Layer
from paxcli.layers.init import Initializer

_THETA = "theta_"  # prefix of the attributes that hold variables


class BaseHParams:
    """Base of a layer's nested `HParams`, whose annotated attributes become the layer's fields."""

    layer: ClassVar[type[BaseLayer]]

    @classmethod
    def config(cls, **fields: Any) -> fdl.Config:
        """An `fdl.Config` of the layer."""
        return cls.layer.config(**fields)

    @classmethod
    def partial(cls, **fields: Any) -> fdl.Partial:
        """An `fdl.Partial` of the layer."""
        return cls.layer.partial(**fields)


def sub_config_field(hparams: type[BaseHParams]) -> Any:
    """An `HParams` attribute that holds the config of a sub-layer."""
    return part(hparams.layer)


def _fans(shape: Sequence[int]) -> list[int]:
    """Fan-in and fan-out as praxis counts them: of the last two dimensions, each multiplied by all others."""
    return [math.prod(shape[:-2]) * dim for dim in (*shape, *shape)[-2:]] or [1, 1]


def _initializer(draw: Callable[..., jax.Array], size: Callable[[Sequence[int]], float] = lambda shape: 1.0) -> Any:
    """A static method `scale -> initializer` that draws values and divides them by the root of a size of the shape."""

    def method(scale: float = 1.0) -> Initializer:
        return lambda key, shape, dtype=jnp.float32: scale * size(shape) ** -0.5 * draw(key, shape=shape, dtype=dtype)

    return staticmethod(method)


_uniform = functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0)
_truncated = functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0)


class WeightInit:
    """Initializers by Pax's names. Each is called with a `scale`, by default 1, that multiplies the values."""

    Constant = _initializer(lambda key, shape, dtype: jnp.ones(shape, dtype))
    Gaussian = _initializer(jax.random.normal)
    GaussianSqrtDim = _initializer(jax.random.normal, lambda shape: shape[0])
    GaussianSqrtFanIn = _initializer(jax.random.normal, lambda shape: _fans(shape)[0])
    GaussianSqrtFanOut = _initializer(jax.random.normal, lambda shape: _fans(shape)[1])
    GaussianSqrtFanAvg = _initializer(jax.random.normal, lambda shape: sum(_fans(shape)) / 2)
    Uniform = _initializer(_uniform)
    UniformSqrtDim = _initializer(_uniform, lambda shape: shape[0])
    UniformSqrtFanAvg = Xavier = _initializer(_uniform, lambda shape: sum(_fans(shape)) / 6)
    UniformUnitScaling = _initializer(_uniform, lambda shape: math.prod(shape[:-1]) / 3)
    TruncatedGaussian = _initializer(_truncated)
    TruncatedGaussianSqrtDim = _initializer(_truncated, lambda shape: shape[0])
    TruncatedGaussianSqrtFanIn = _initializer(_truncated, lambda shape: _fans(shape)[0])
    TruncatedGaussianSqrtFanOut = _initializer(_truncated, lambda shape: _fans(shape)[1])


@dataclasses.dataclass(frozen=True)
class WeightHParams:
    """Shape and initializer of a variable; default: Xavier, as in Pax also for vectors. `dtype` can only be float32."""

    shape: Sequence[int]
    init: Initializer | None = None
    dtype: Any = None

    def __post_init__(self) -> None:
        if self.dtype is not None and jnp.dtype(self.dtype) != jnp.float32:
            hint = "Leave it out. The model's `fprop_dtype` is the dtype of the forward pass."
            raise ConfigError(f"WeightHParams: dtype={jnp.dtype(self.dtype)}, but variables are float32.", hint)


class BaseLayer(Layer):
    """A Flax module whose fields are declared in `HParams` and whose forward pass is `fprop`.

    Fields may also be declared in the class itself, and the forward pass as `__call__`, as in newer layers of Pax.

    Attributes:
      params_init: Pax's default initializer, for `WeightHParams(init=self.params_init)`; a field may replace it.
      dtype: The dtype of variables.
    """

    HParams: ClassVar[type[BaseHParams]] = BaseHParams
    params_init = staticmethod(WeightInit.Xavier())
    dtype = jnp.float32

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = cls.__dict__.get("HParams")
        if own is not None and not issubclass(own, BaseHParams):
            raise TypeError(f"{cls.__name__}.HParams must inherit BaseHParams.")
        fields = own.__dict__.get("__annotations__", {}) if own else {}
        for name in fields:
            if name in own.__dict__:
                setattr(cls, name, own.__dict__[name])
        cls.__annotations__ = cls.__dict__.get("__annotations__", {}) | fields
        # A subclass of HParams for each layer, which refers to the layer it configures.
        cls.HParams = type("HParams", (own or cls.HParams,), {"layer": cls, "__module__": cls.__module__})
        super().__init_subclass__(**kwargs)

    def fprop(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fprop(*args, **kwargs)

    @property
    def hparams(self) -> _View:
        """The fields; sub-layers as templates that can be copied and changed before `create_child`."""
        return _View(self)

    @property
    def theta(self) -> _View:
        """The variables by name."""
        return _View(self, _THETA)

    def create_variable(self, name: str, spec: WeightHParams) -> None:
        """Creates a trainable variable, available as `self.theta.<name>`."""
        shape = tuple(spec.shape)
        last = len(shape) - 1
        dims: dict[str, Any] = dict(contracts=tuple(range(last)), produces=(last,)) if last > 0 else {}
        weight = self.weight(name, spec.init or WeightInit.Xavier(), shape, (None,) * len(shape), **dims)
        setattr(self, _THETA + name, weight)

    def create_child(self, name: str, template: Template | fdl.Buildable | nn.Module) -> None:
        """Creates a sub-layer, available as `self.<name>`. A config used twice makes one layer."""
        if isinstance(template, fdl.Buildable):
            template = fdl.build(template)
        setattr(self, name, template.instantiate() if isinstance(template, Template) else template)


class Template:
    """A sub-layer before it is instantiated."""

    def __init__(self, module: nn.Module, changes: dict[str, Any] | None = None):
        self._module, self._changes = module, dict(changes or {})

    def clone(self) -> Template:
        """An independent copy."""
        return Template(self._module, self._changes)

    def set(self, **fields: Any) -> Template:
        """Changes fields. A misspelt one raises at once."""
        known = [field.name for field in dataclasses.fields(self._module)]  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                raise AttributeError(f"{type(self._module).__name__} has no field `{name}`; it has {', '.join(known)}.")
        self._changes.update(fields)
        return self

    def instantiate(self) -> nn.Module:
        """The layer: the given one if nothing was changed, else a changed copy."""
        return self._module.clone(parent=None, name=None, **self._changes) if self._changes else self._module

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._module, name)


class _View:
    """A layer's attributes whose names begin with `prefix`, sub-layers as templates, as code for Pax reads them."""

    def __init__(self, layer: BaseLayer, prefix: str = ""):
        self._layer, self._prefix = layer, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, self._prefix + name)
        return Template(value) if isinstance(value, nn.Module) else value
