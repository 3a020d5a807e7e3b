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
from collections.abc import Sequence
from typing import Any, ClassVar

import fiddle as fdl
import flax.linen as nn

from paxcli.config.configurable import part
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


class WeightInit:
    """Initializers by Pax's names."""

    @staticmethod
    def Gaussian(scale: float = 1.0) -> Initializer:  # noqa: N802 - Pax's name
        """Normal with deviation `scale`."""
        return nn.initializers.normal(scale)

    @staticmethod
    def Constant(scale: float = 0.0) -> Initializer:  # noqa: N802 - Pax's name
        """The constant `scale`."""
        return nn.initializers.constant(scale)

    @staticmethod
    def Xavier(scale: float = 1.0) -> Initializer:  # noqa: N802 - Pax's name
        """Uniform, by fan in and fan out of the last two dimensions."""
        return nn.initializers.variance_scaling(scale**2, "fan_avg", "uniform")


@dataclasses.dataclass(frozen=True)
class WeightHParams:
    """Shape and initializer of a variable; default: Xavier for matrices and 0 for vectors."""

    shape: Sequence[int]
    init: Initializer | None = None


class BaseLayer(Layer):
    """A Flax module whose fields are declared in `HParams` and whose forward pass is `fprop`."""

    HParams: ClassVar[type[BaseHParams]] = BaseHParams

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
        init = spec.init or (WeightInit.Xavier() if last > 0 else WeightInit.Constant())
        setattr(self, _THETA + name, self.weight(name, init, shape, (None,) * len(shape), **dims))

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
