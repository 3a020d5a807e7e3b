"""Five updates of Pax's Adam, clipped and scheduled, against what real paxml reported."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from paxcli.optim.adam import Adam
from paxcli.optim.schedules import Constant, LinearRampupExponentialDecay
from paxcli.training.learner import Learner
from tests import reference

_ADAM = Adam(beta1=0.9, beta2=0.99, epsilon=1e-6, clip_threshold=1.0, weight_decay=1e-3)
_LEARNERS = {
    "recipe": Learner(
        optimizer=_ADAM,
        learning_rate=1e-3,
        schedule=LinearRampupExponentialDecay(warmup_steps=4000, decay_start=4001, decay_end=300000, min_ratio=0.1),
        clip_gradient_norm_to_value=5.0,
    ),
    "const": Learner(optimizer=_ADAM, learning_rate=1e-2, schedule=Constant(), clip_gradient_norm_to_value=5.0),
}


@pytest.mark.parametrize("run", ["recipe", "const"])
def test_six_steps(run):
    model, batch, learner = reference.model(), reference.batch(), _LEARNERS[run]

    @jax.jit
    def step(params, opt_state, number):
        loss, grads = jax.value_and_grad(lambda p: model.apply({"params": p}, batch)[0]["loss"][0])(params)
        return loss, *learner.update(grads, opt_state, params, number)

    params = reference.params("param")
    opt_state = learner.init(params)
    for number in range(6):
        before = params
        loss, params, opt_state, report = step(params, opt_state, number)
        np.testing.assert_allclose(loss, reference.ARRAYS[f"{run}/loss"][number], rtol=1e-6)
        np.testing.assert_allclose(report["learning_rate"], reference.ARRAYS[f"{run}/learning_rate"][number], rtol=1e-6)
        np.testing.assert_allclose(report["grad_norm"], reference.ARRAYS[f"{run}/raw_grad_norm"][number], rtol=1e-5)
    expected = reference.params(f"{run}/param5")
    # By norm: where a gradient is all but 0, Adam divides rounding by rounding.
    errors = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), before, expected)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors
