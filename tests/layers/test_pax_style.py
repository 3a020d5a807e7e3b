"""Layers written as Pax's documentation writes them."""

from __future__ import annotations

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.linear import Linear as OurLinear
from paxcli.layers.pax_style import BaseHParams, BaseLayer, WeightHParams, WeightInit, sub_config_field


class Linear(BaseLayer):
    class HParams(BaseHParams):
        input_dims: int = 0
        output_dims: int = 0

    def setup(self):
        p = self.hparams
        self.create_variable("w", WeightHParams(shape=[p.input_dims, p.output_dims]))

    def fprop(self, x):
        return jnp.dot(x, self.theta.w)


class BiasedLinear(Linear):
    class HParams(Linear.HParams):
        bias_init: float = 0.0

    def setup(self):
        super().setup()
        p = self.hparams
        self.create_variable("b", WeightHParams(shape=[p.output_dims], init=WeightInit.Constant(p.bias_init)))

    def fprop(self, x):
        return super().fprop(x) + self.theta.b


class FeedForward(BaseLayer):
    class HParams(BaseHParams):
        model_dims: int = 0
        hidden_dims: int = 0
        linear_tpl: BaseHParams = sub_config_field(Linear.HParams)

    def setup(self):
        p = self.hparams
        self.create_child("widen", p.linear_tpl.clone().set(input_dims=p.model_dims, output_dims=p.hidden_dims))
        self.create_child("narrow", p.linear_tpl.clone().set(input_dims=p.hidden_dims, output_dims=p.model_dims))

    def fprop(self, x):
        return self.narrow.fprop(nn.relu(self.widen.fprop(x)))


class Twice(BaseLayer):
    class HParams(BaseHParams):
        first: BaseHParams = sub_config_field(Linear.HParams)
        second: BaseHParams = sub_config_field(Linear.HParams)

    def setup(self):
        self.create_child("a", self.hparams.first)
        self.create_child("b", self.hparams.second)

    def fprop(self, x):
        return self.b(self.a(x))


X = jnp.arange(6.0).reshape(2, 3)


def _init(config: fdl.Config, x=X):
    layer = fdl.build(config)
    return layer, nn.meta.unbox(layer.init(jax.random.key(0), x))


def test_a_layer_computes():
    layer, variables = _init(Linear.HParams.config(input_dims=3, output_dims=4))
    np.testing.assert_allclose(layer.apply(variables, X), X @ variables["params"]["w"], rtol=1e-6)
    np.testing.assert_allclose(layer.apply(variables, X, method="fprop"), X @ variables["params"]["w"], rtol=1e-6)


def test_a_typo_raises_at_once():
    with pytest.raises(TypeError, match="input_dim"):
        Linear.HParams.config(input_dim=1)
    config = Linear.HParams.config(input_dims=1)
    with pytest.raises(AttributeError, match="output_dim"):
        config.output_dim = 2
    with pytest.raises(AttributeError, match="hidden"):
        _init(Wrong.HParams.config())


class Wrong(BaseLayer):
    class HParams(BaseHParams):
        linear_tpl: BaseHParams = sub_config_field(Linear.HParams)

    def setup(self):
        self.create_child("linear", self.hparams.linear_tpl.clone().set(hidden=3))

    def fprop(self, x):
        return self.linear.fprop(x)


def test_configs_are_stock_fiddle():
    assert type(Linear.HParams.config()) is fdl.Config
    assert type(Linear.HParams.partial()) is fdl.Partial
    assert fdl.build(Linear.HParams.partial(input_dims=3))(output_dims=2).output_dims == 2


def test_hparams_are_inherited():
    config = BiasedLinear.HParams.config(input_dims=3, output_dims=2, bias_init=7.0)
    layer, variables = _init(config)
    assert fdl.get_callable(config) is BiasedLinear
    np.testing.assert_allclose(layer.apply(variables, X) - X @ variables["params"]["w"], 7.0, rtol=1e-5)


def test_sub_configs_can_be_swapped_and_widened():
    config = FeedForward.HParams.config(model_dims=3, hidden_dims=5)
    config.linear_tpl = BiasedLinear.HParams.config(bias_init=0.5)
    layer, variables = _init(config)
    params = variables["params"]
    assert params["widen"]["w"].shape == (3, 5) and params["narrow"]["w"].shape == (5, 3)
    hidden = nn.relu(X @ params["widen"]["w"] + 0.5)
    np.testing.assert_allclose(layer.apply(variables, X), hidden @ params["narrow"]["w"] + 0.5, rtol=1e-5)


def test_one_config_in_two_places_is_one_layer():
    shared = Linear.HParams.config(input_dims=3, output_dims=3)
    layer, variables = _init(Twice.HParams.config(first=shared, second=shared))
    (w,) = jax.tree.leaves(variables["params"])
    np.testing.assert_allclose(layer.apply(variables, X), X @ w @ w, rtol=1e-5)
    separate = [Linear.HParams.config(input_dims=3, output_dims=3) for _ in range(2)]
    _, variables = _init(Twice.HParams.config(first=separate[0], second=separate[1]))
    assert len(jax.tree.leaves(variables["params"])) == 2


def test_our_layers_fit_in():
    config = Twice.HParams.config(
        first=OurLinear.config(input_dims=3, output_dims=4), second=Linear.HParams.config(input_dims=4, output_dims=2)
    )
    layer, variables = _init(config)
    assert layer.apply(variables, X).shape == (2, 2)


def test_hparams_must_be_hparams():
    with pytest.raises(TypeError, match="BaseHParams"):

        class Bad(BaseLayer):
            class HParams:
                dims: int = 0
