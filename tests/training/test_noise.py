"""Variational noise: its distribution, and the parameters and steps that it applies to, as in paxml."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.training.session import build_session
from paxcli.training.step import make_train_step
from paxcli.training.task import VariationalNoise
from tests.training.test_step import _small

PARAMS = {
    "embedding": {"table": jnp.full((300, 40), 2.0)},
    "stack": {"feed_forward": {"w_in": jnp.zeros((2, 100, 50)), "w_out": jnp.ones((2, 100, 50))}},
}


def noise_of(step: int, key: int = 0, **fields) -> dict[str, np.ndarray]:
    """The noise of each parameter."""
    noisy = VariationalNoise(**fields).add_to(PARAMS, jnp.int32(step), jax.random.key(key))
    added = jax.tree.map(jnp.subtract, noisy, PARAMS)
    return {path[-1].key: np.asarray(leaf).ravel() for path, leaf in jax.tree_util.tree_leaves_with_path(added)}


def test_noise_is_normal_with_its_scale_and_independent() -> None:
    added = noise_of(0, scale=0.05)
    for values in added.values():
        assert abs(values.mean()) < 4 * 0.05 / np.sqrt(values.size)
        assert abs(values.std() / 0.05 - 1) < 4 / np.sqrt(2 * values.size)
        # The share within one, two and three deviations, which only a normal distribution has.
        shares = [np.mean(np.abs(values) < 0.05 * k) for k in (1, 2, 3)]
        np.testing.assert_allclose(shares, [0.6827, 0.9545, 0.9973], atol=4 * 0.5 / np.sqrt(values.size))
    pairs = itertools.combinations([*added.values(), noise_of(0, key=1, scale=0.05)["w_in"]], 2)
    for one, other in pairs:
        assert abs(np.corrcoef(one[:10_000], other[:10_000])[0, 1]) < 0.04


def test_a_regex_chooses_the_parameters() -> None:
    added = noise_of(0, scale=0.05, regex="feed_forward/w_in")
    assert added["w_in"].all() and not added["w_out"].any() and not added["table"].any()


def test_noise_starts_at_its_step_counted_from_0() -> None:
    assert [bool(noise_of(step, scale=0.05, start_step=3)["table"].any()) for step in (0, 2, 3, 4)] == [0, 0, 1, 1]


def test_each_step_draws_other_noise_and_no_parameter_keeps_it() -> None:
    config = _small()
    config.task.vn = VariationalNoise.config(scale=0.3)
    config.task.train.learner.learning_rate = 0.0
    with build_session(config).active() as session:
        task = session.experiment.task
        state = session.new_state()
        before = jax.device_get(state.params)
        step, batch, losses = make_train_step(task, session.abstract), session.experiment.train_input.get_next(), []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


def test_the_reference_of_dpo_has_no_noise():
    params = {"w": jnp.ones(4), "reference": {"w": jnp.ones(4)}}
    for regex in (None, "w$"):
        noisy = VariationalNoise(scale=1.0, regex=regex).add_to(params, jnp.int32(0), jax.random.key(0))
        assert (noisy["w"] != 1).all() and (noisy["reference"]["w"] == 1).all()
