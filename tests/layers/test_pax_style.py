"""Layers written as Pax's documentation writes them."""

from __future__ import annotations

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
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


# The standard deviation of values of shape [4, 60, 50], whose fans praxis counts as 240 and 200, with a scale of 2.
STDDEVS = {
    "Gaussian": 2,
    "GaussianSqrtDim": 2 / 4**0.5,
    "GaussianSqrtFanIn": 2 / 240**0.5,
    "GaussianSqrtFanOut": 2 / 200**0.5,
    "GaussianSqrtFanAvg": 2 / 220**0.5,
    "Uniform": 2 / 3**0.5,
    "UniformSqrtDim": 2 / 4**0.5 / 3**0.5,
    "UniformSqrtFanAvg": 2 / 220**0.5,
    "UniformUnitScaling": 2 / 240**0.5,
    "Xavier": 2 / 220**0.5,
    "TruncatedGaussian": 2 * 0.8796,  # that of a normal distribution within 2 standard deviations
    "TruncatedGaussianSqrtDim": 2 * 0.8796 / 4**0.5,
    "TruncatedGaussianSqrtFanIn": 2 * 0.8796 / 240**0.5,
    "TruncatedGaussianSqrtFanOut": 2 * 0.8796 / 200**0.5,
}


@pytest.mark.parametrize("name", STDDEVS)
def test_initializers_are_those_of_praxis(name):
    init = getattr(WeightInit, name)(2.0)
    values = np.asarray(init(jax.random.key(1), (4, 60, 50)))
    np.testing.assert_allclose([values.mean(), values.std()], [0, STDDEVS[name]], rtol=0.02, atol=0.03 * STDDEVS[name])
    if "Gaussian" not in name:
        np.testing.assert_allclose(np.abs(values).max(), STDDEVS[name] * 3**0.5, rtol=1e-3)
    elif "Truncated" in name:
        assert np.abs(values).max() <= 2 * STDDEVS[name] / 0.8796


def test_defaults_of_initializers_are_those_of_praxis():
    np.testing.assert_array_equal(WeightInit.Constant()(None, (3,)), 1)
    assert WeightInit.Xavier()(jax.random.key(0), ()).shape == ()
    values = np.abs(WeightInit.Xavier()(jax.random.key(0), (600,)))
    np.testing.assert_allclose(values.max(), (6 / 1200) ** 0.5, rtol=0.01)


class NewStyle(BaseLayer):
    """As Pax's notebook of layers writes one."""

    input_dims: int = 0
    output_dims: int = 0

    def setup(self):
        shape = [self.input_dims, self.output_dims]
        self.create_variable("w", WeightHParams(shape=shape, init=self.params_init, dtype=self.dtype))
        self.create_variable("b", WeightHParams(shape=[self.output_dims]))

    def __call__(self, x):
        return jnp.matmul(x, self.theta.w) + self.theta.b


def test_fields_may_be_those_of_the_class():
    layer, variables = _init(fdl.Config(NewStyle, name="ffn", input_dims=3, output_dims=400))
    w, b = (variables["params"][name] for name in "wb")
    np.testing.assert_allclose(layer.apply(variables, X), X @ w + b, rtol=1e-6)
    limits = [(6 / 403) ** 0.5, (6 / 800) ** 0.5]
    np.testing.assert_allclose([np.abs(w).max(), np.abs(b).max()], limits, rtol=0.01)


def test_variables_are_float32():
    with pytest.raises(ConfigError, match="dtype=bfloat16"):
        WeightHParams(shape=[3], dtype=jnp.bfloat16)


def test_hparams_must_be_hparams():
    with pytest.raises(TypeError, match="BaseHParams"):

        class Bad(BaseLayer):
            class HParams:
                dims: int = 0
