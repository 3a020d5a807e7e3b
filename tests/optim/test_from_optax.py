"""An optax optimizer under the learner does what it does under optax."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.optim.curves import LinearSchedule
from paxcli.optim.from_optax import Optax
from paxcli.training.learner import Learner


def own(learning_rate, beta: float = 0.5):
    """An optimizer of one's own, with a norm's clip that depends on the learning rate."""
    return optax.chain(optax.trace(beta), optax.scale_by_learning_rate(learning_rate), optax.clip(1e-3))


@pytest.mark.parametrize("factory", [functools.partial(optax.lion, b1=0.8), functools.partial(own, beta=0.9)])
def test_equals_optax_along_a_schedule(factory):
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4))}
    grads = [jax.tree.map(lambda p, n=n: jnp.sin(p * (n + 2)), params) for n in range(4)]
    schedule = LinearSchedule((0, 0.1), (3, 1.0))
    learner = Learner(optimizer=Optax(factory), learning_rate=0.01, schedule=schedule, clip_gradient_norm_to_value=None)
    ours, state, update = params, learner.init(params, {"w": None}), jax.jit(learner.update)
    theirs = factory(learning_rate=lambda count: 0.01 * schedule(count))
    theirs_state = theirs.init(params)
    for number, grad in enumerate(grads):
        ours, state, _ = update(grad, state, ours, jnp.int32(number), {"w": None})
        updates, theirs_state = theirs.update(grad, theirs_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours["w"], params["w"], rtol=1e-6)
