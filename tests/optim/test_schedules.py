"""Schedules at points computed by hand, and against optax where it has the same."""

from __future__ import annotations

import contextlib

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pax_recipes.tiny import tiny_synthetic
from paxcli.config.tree import check_ranges
from paxcli.errors import ConfigError
from paxcli.optim.curves import ContinuousSchedule, Cosine, DelayedCosine, Exponential, LinearSchedule, Polynomial
from paxcli.optim.piecewise import CycleSchedule, LinearRampupPiecewiseConstant, PiecewiseConstant, PiecewiseSchedule
from paxcli.optim.schedules import (
    Constant,
    LinearRampupCosineDecay,
    LinearRampupExponentialDecay,
    LinearRampupPolynomialDecay,
    LinearRampupSqrtDecay,
    NoamSchedule,
    SqrtDecay,
)
from paxcli.training.experiment import with_derived_sizes
from paxcli.training.validate import validate


def _values(schedule, steps) -> np.ndarray:
    """Computed as in the training step: jitted, with the step as int32."""
    return np.asarray([jax.jit(schedule)(jnp.int32(step)) for step in steps])


_DOWN = dict(start=(10, 2.0), limit=(20, 0.5))
_PIECES = PiecewiseSchedule(
    (10, 20), (LinearSchedule((0, 0.0), (10, 1.0)), Constant(), Exponential((0, 1.0), (10, 0.01)))
)
_CYCLE = CycleSchedule(
    (Constant(), LinearSchedule((0, 0.0), (100, 1.0)), LinearSchedule((0, 5.0), (1, 5.0))), (2, 3, 1)
)

_BY_HAND = {
    "constant": (Constant(), {0: 1, 1000: 1}),
    "linear": (LinearSchedule(**_DOWN), {0: 2, 10: 2, 14: 1.4, 20: 0.5, 99: 0.5}),
    "polynomial": (Polynomial(**_DOWN, power=2.0), {0: 2, 14: 2 - 0.16 * 1.5, 20: 0.5, 99: 0.5}),
    "polynomial to limit": (Polynomial(**_DOWN, power=2.0, origin="limit"), {0: 2, 14: 2 - (1 - 0.36) * 1.5, 99: 0.5}),
    "exponential": (Exponential(**_DOWN), {0: 2, 10: 2, 15: 1, 20: 0.5, 99: 0.5}),
    "delayed cosine": (DelayedCosine(**_DOWN), {0: 2, 10: 2, 15: 1.25, 20: 0.5, 99: 0.5}),
    "cosine": (Cosine(2.0, 1.0, 60), {0: 2, 20: 1.75, 30: 1.5, 60: 1, 99: 1}),
    "continuous": (ContinuousSchedule(3.0, 10, 5, 0.2), {0: 3, 10: 3, 15: 1.5, 20: 0.75, 99: 0.6}),
    "ramp, exponential": (LinearRampupExponentialDecay(10, 20, 120, 0.01), {0: 0, 5: 0.5, 20: 1, 70: 0.1, 999: 0.01}),
    "ramp, exponential, at once": (
        LinearRampupExponentialDecay(10, None, 110, 0.01),
        {5: 0.5, 10: 1, 60: 0.1, 110: 0.01},
    ),
    "ramp, polynomial": (
        LinearRampupPolynomialDecay(10, 20, 30, 0.2, power=2.0),
        {0: 0, 5: 0.5, 10: 1, 20: 1, 25: 0.8, 30: 0.2, 99: 0.2},
    ),
    "ramp, cosine, max": (LinearRampupCosineDecay(10, 20, 30, 0.1, 0.5), {0: 0, 5: 0.25, 15: 0.5, 25: 0.275, 99: 0.05}),
    "ramp, cosine, at once": (LinearRampupCosineDecay(10, None, 10, 0.1), {0: 0, 9: 0.9, 10: 0.1, 99: 0.1}),
    "ramp, cosine, start": (
        LinearRampupCosineDecay(10, 20, 30, 0.1, 0.5, start_step=100),
        {0: 1, 99: 1, 100: 0, 105: 0.25, 115: 0.5, 125: 0.275, 199: 0.05},
    ),
    "ramp, exponential, max": (
        LinearRampupExponentialDecay(10, 20, 120, 0.01, max=3.0),
        {0: 0, 5: 1.5, 20: 3, 70: 0.3, 999: 0.03},
    ),
    "ramp, polynomial, max": (
        LinearRampupPolynomialDecay(10, 20, 30, 0.2, 0.5, power=2.0),
        {5: 0.25, 10: 0.5, 20: 0.5, 25: 0.4, 99: 0.1},
    ),
    "ramp, square root": (LinearRampupSqrtDecay(2.0, 100), {0: 0.02, 1: 0.02, 50: 1, 100: 2, 400: 1}),
    "ramp, pieces": (
        LinearRampupPiecewiseConstant((10, 20, 30), (1.0, 0.1, 0.01)),
        {0: 0, 5: 0.5, 10: 1, 19: 1, 20: 0.1, 29: 0.1, 30: 0.01, 99: 0.01},
    ),
    "square root": (SqrtDecay(100, 3.0, 10.0), {0: 0.3, 110: 0.3, 410: 0.15}),
    "transformer": (
        NoamSchedule(100, 64, 4, 2499),
        {0: 400**-1.5 / 8, 399: 1 / 160, 1599: 1 / 320, 2499: 1 / 400, 9999: 1 / 400},
    ),
    "constant pieces": (PiecewiseConstant((5, 8), (1.0, 0.0, 0.5)), {0: 1, 4: 1, 5: 0, 7: 0, 8: 0.5, 99: 0.5}),
    "pieces": (_PIECES, {0: 0, 5: 0.5, 10: 1, 19: 1, 20: 1, 25: 0.1, 30: 0.01, 99: 0.01}),
    "cycle": (_CYCLE, {0: 1, 1: 1, 2: 0.02, 4: 0.04, 5: 5, 6: 1, 8: 0.08, 11: 5}),
}


@pytest.mark.parametrize("name", _BY_HAND)
def test_by_hand(name):
    schedule, points = _BY_HAND[name]
    schedule.validate()
    np.testing.assert_allclose(_values(schedule, points), list(points.values()), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("decay_end", "is_refused"), [(399, True), (400, False), (None, False)])
def test_a_decay_may_not_end_within_the_warmup(decay_end, is_refused):
    """The factor stayed at that of a step of the warmup. A run that ends within the warmup is not refused."""
    config = tiny_synthetic()
    config.task.train.num_train_steps = 300
    config.task.train.learner.schedule = NoamSchedule.config(warmup_steps=100, worker_replicas=4, decay_end=decay_end)
    with pytest.raises(ConfigError, match=r"must rise, not \[400, 399\]") if is_refused else contextlib.nullcontext():
        validate(config)


_OPTAX = {
    "cosine": (LinearRampupCosineDecay(10, None, 100, 0.1), optax.warmup_cosine_decay_schedule(0, 1, 10, 100, 0.1)),
    "linear": (LinearSchedule((10, 2.0), (90, 0.5)), optax.linear_schedule(2.0, 0.5, 80, 10)),
    # optax counts the share of steps that are left, as our `origin="limit"` does.
    "polynomial": (Polynomial((10, 2.0), (90, 0.5), 3.0, "limit"), optax.polynomial_schedule(2.0, 0.5, 3, 80, 10)),
    "exponential": (Exponential((10, 1.0), (110, 0.2)), optax.exponential_decay(1.0, 100, 0.2, 10, False, 0.2)),
    "cosine alone": (Cosine(1.0, 0.25, 100), optax.cosine_decay_schedule(1.0, 100, 0.25)),
    "pieces": (
        PiecewiseConstant((10, 50), (1.0, 0.5, 0.1)),
        optax.piecewise_constant_schedule(1.0, {10: 0.5, 50: 0.2}),
    ),
}


@pytest.mark.parametrize("name", _OPTAX)
def test_as_optax(name):
    ours, theirs = _OPTAX[name]
    steps = [0, 1, 9, 10, 11, 49, 50, 51, 99, 100, 500]
    np.testing.assert_allclose(_values(ours, steps), [theirs(step) for step in steps], rtol=2e-5)


@pytest.mark.parametrize(
    "schedule",
    [
        LinearSchedule((5, 1.0), (5, 0.0)),
        PiecewiseConstant((1, 2), (1.0, 2.0)),
        PiecewiseConstant((2, 1), (1.0, 2.0, 3.0)),
        PiecewiseConstant((2, 2), (1.0, 2.0, 3.0)),
        LinearRampupCosineDecay(10, 100, 50),
        LinearRampupPolynomialDecay(100, 50, 200),
        LinearRampupExponentialDecay(100, None, 50),
        LinearRampupPiecewiseConstant((), ()),
        PiecewiseSchedule((1,), (Constant(),)),
        PiecewiseSchedule((1,), (Constant(), DelayedCosine((2, 1.0), (1, 0.0)))),
        PiecewiseSchedule((1,), (Constant(), LinearRampupCosineDecay())),
        CycleSchedule((Constant(),), ()),
    ],
)
def test_what_does_not_fit_is_refused(schedule):
    with pytest.raises(ConfigError):
        schedule.validate()


def test_an_exponential_decay_does_not_end_at_zero():
    """It was zero from its first step on."""
    with pytest.raises(ConfigError, match="min_ratio must be above 0"):
        check_ranges(LinearRampupExponentialDecay.config(decay_end=9, min_ratio=0.0))


@pytest.mark.parametrize("schedule", [{"warmup_steps": 100}, {"warmup_steps": 5, "decay_start": 80}])
def test_a_run_may_end_before_the_decay(schedule):
    config = tiny_synthetic()
    config.task.train.num_train_steps = 50
    config.task.train.learner.schedule = LinearRampupCosineDecay.config(**schedule)
    validate(config)
    ready = fdl.build(with_derived_sizes(config, 1)).task.train.learner.schedule
    rising = [min(step / schedule["warmup_steps"], 1) for step in range(51)]
    np.testing.assert_allclose(_values(ready, range(51)), rising, rtol=1e-6)


def test_a_decay_that_starts_late_ends_with_the_run():
    """It ended as many steps after the run as it started late."""
    config = tiny_synthetic()
    config.task.train.num_train_steps = 100
    config.task.train.learner.schedule = LinearRampupCosineDecay.config(warmup_steps=10, start_step=50)
    schedule = fdl.build(with_derived_sizes(config, 1)).task.train.learner.schedule
    expected = optax.warmup_cosine_decay_schedule(0, 1, 10, 50, 0.1)
    np.testing.assert_allclose(_values(schedule, range(50, 101)), [expected(step) for step in range(51)], atol=1e-6)
