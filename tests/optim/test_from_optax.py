"""An optax optimizer under the learner does what it does under optax."""

from __future__ import annotations

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.optim.curves import LinearSchedule
from paxcli.optim.from_optax import Optax
from paxcli.training.learner import Learner


def own(learning_rate, beta: float = 0.5):
    """An optimizer of one's own, with a norm's clip that depends on the learning rate."""
    return optax.chain(optax.trace(beta), optax.scale_by_learning_rate(learning_rate), optax.clip(1e-3))


@pytest.mark.parametrize(
    ("optimizer", "factory"),
    [
        (Optax(functools.partial(own, beta=0.9)), functools.partial(own, beta=0.9)),
        (
            Optax(optax.adafactor, {"min_dim_size_to_factor": 2}),
            functools.partial(optax.adafactor, min_dim_size_to_factor=2),
        ),
        (Optax("lion", {"b1": 0.8}), functools.partial(optax.lion, b1=0.8)),
    ],
)
def test_equals_optax_along_a_schedule(optimizer, factory):
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4))}
    grads = [jax.tree.map(lambda p, n=n: jnp.sin(p * (n + 2)), params) for n in range(4)]
    schedule = LinearSchedule((0, 0.1), (3, 1.0))
    learner = Learner(optimizer=optimizer, learning_rate=0.01, schedule=schedule, clip_gradient_norm_to_value=None)
    ours, state, update = params, learner.init(params, {"w": None}), jax.jit(learner.update)
    theirs = factory(learning_rate=lambda count: 0.01 * schedule(count))
    theirs_state = theirs.init(params)
    for number, grad in enumerate(grads):
        ours, state, _ = update(grad, state, ours, jnp.int32(number), {"w": None})
        updates, theirs_state = theirs.update(grad, theirs_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours["w"], params["w"], rtol=1e-6)


def test_an_optimizer_of_optax_by_name_and_arguments():
    names = ["optimizer=Optax", "factory=adafactor", "arguments={min_dim_size_to_factor: 32, factored: true}"]
    learner = fdl.build(resolve("tiny-synthetic", (), names).config.task.train.learner)
    assert learner.optimizer == Optax("adafactor", {"min_dim_size_to_factor": 32, "factored": True})
    learner.optimizer.validate()


@pytest.mark.parametrize("factory", ["rprop", optax.rprop])
def test_steps_that_start_at_the_learning_rate_are_refused(factory):
    with pytest.raises(ConfigError, match="Rprop's first step"):
        Optax(factory).validate()


_FILE = """
import optax
from pax_recipes.tiny import tiny_synthetic
from paxcli.config.recipe import recipe
from paxcli.optim.from_optax import Optax


def clipped_lion(learning_rate, limit):
    return optax.chain(optax.clip(limit), optax.lion(learning_rate))


@recipe()
def mine():
    \"\"\"A chain of one's own.\"\"\"
    config = tiny_synthetic()
    config.task.train.learner.optimizer = Optax.config(factory=clipped_lion, arguments={"limit": 0.5})
    return config
"""


def test_a_chain_from_a_users_file(tmp_path):
    (tmp_path / "mine.py").write_text(_FILE)
    learner = fdl.build(resolve(f"{tmp_path / 'mine.py'}:mine", (), ()).config.task.train.learner)
    learner.optimizer.validate()
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.asarray([3.0, -0.1])}
    ours = learner.optimizer.with_learning_rate(None)
    updates, _ = ours.update(grads, ours.init(params), params, learning_rate=0.1)
    theirs = optax.chain(optax.clip(0.5), optax.lion(0.1))
    expected, _ = theirs.update(grads, theirs.init(params), params)
    np.testing.assert_allclose(updates["w"], -expected["w"], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "message", "hint"),
    [
        (Optax("adafacto"), "no optimizer `adafacto`", "`adafactor`"),
        (Optax("clip"), "no optimizer `clip`", ""),
        (Optax("lion", {"beta": 0.9}), "unexpected keyword argument 'beta'", ""),
        (Optax(optax.clip), "unexpected keyword argument 'learning_rate'|missing a required argument", ""),
    ],
)
def test_what_optax_does_not_have_is_refused(optimizer, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        Learner(optimizer=optimizer).validate()
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("lbfgs", "missing 3 required keyword-only arguments: 'value'"),
        ("momo", "missing 1 required keyword-only argument: 'value'"),
        pytest.param(
            *("noisy_sgd", "key"),  # optax 0.2.7 requires one; before, its state holds a default one
            marks=pytest.mark.filterwarnings("ignore:Specifying a key will be required"),
        ),
        ("linear_schedule", "optax has no optimizer"),
    ],
)
def test_an_optimizer_that_needs_more_than_gradients_is_refused(factory, message):
    with pytest.raises(ConfigError, match=message):
        Optax(factory).validate()


def test_optimizers_of_contrib_have_names_too():
    Optax("prodigy", {"estim_lr_coef": 2.0}).validate()
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    ours, theirs = Optax("adopt").with_learning_rate(None), optax.contrib.adopt(0.1)
    found, _ = ours.update(params, ours.init(params), params, learning_rate=0.1)
    expected, _ = theirs.update(params, theirs.init(params), params)
    np.testing.assert_allclose(found["w"], -expected["w"])
