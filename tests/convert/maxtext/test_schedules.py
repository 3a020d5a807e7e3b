"""Schedules and optimizers of MaxText's launches: the rate of every step, by a formula of our own."""

from __future__ import annotations

import datetime
import math

import fiddle as fdl
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.convert.maxtext.conversion import Conversion
from paxcli.convert.maxtext.launch import Launch, Pair
from paxcli.convert.maxtext.launch_to_recipe import BASE_RECIPE, convert
from paxcli.convert.maxtext.recipe_to_launch import to_maxtext
from paxcli.convert.runs import recipe_with
from paxcli.errors import ConfigError


def of_keys(date: str = "2026-08-22", **keys: object) -> Conversion:
    pairs = [Pair(key, str(value), 1) for key, value in {"model_name": "gpt3-52k", **keys}.items()]
    return convert(Launch(1, pairs=pairs), "keys", date=datetime.date.fromisoformat(date))


def rates(converted: Conversion) -> list[float]:
    """The learning rate of every step of a converted run."""
    learner = recipe_with(BASE_RECIPE, converted.values).task.train.learner
    schedule = fdl.build(learner.schedule)
    schedule.validate()
    steps = range(converted.values["task.train.num_train_steps"])
    return [learner.learning_rate * float(schedule(jnp.asarray(step))) for step in steps]


def warmup_stable_decay(step: int, total: int, warmup: float, decay: float, style: str, final: float) -> float:
    """The rate of one step as a fraction of the largest, in MaxText: three pieces, then 0.

    The decay of d steps has its first value at its first step and its last value at its last; of one step, a cosine
    has the last value and a line, which has no length, the first.
    """
    num_warmup, num_decay = int(total * warmup), int(total * decay)
    start = total - num_decay
    if step >= total:
        return 0.0
    if step < num_warmup:
        return step / num_warmup
    if step < start:
        return 1.0
    if style == "linear":
        done = (step - start) / (num_decay - 1) if num_decay > 1 else 0.0
    else:
        done = (step - start) / (num_decay - 1) if num_decay > 1 else 1.0
        done = 0.5 - 0.5 * math.cos(math.pi * done)
    return 1 - (1 - final) * done


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("steps", "length", "warmup", "decay", "final"),
    [
        (40, -1, 0.1, 0.1, 0.1),
        (40, 30, 0.1, 0.2, 0.1),
        (20, 50, 0.1, 0.5, 0.0),
        (20, -1, 0.0, 0.3, 0.2),
        (20, -1, 0.5, 0.5, 0.1),
        (20, 15, 0.1, 0.0, 0.1),
        (20, 12, 0.25, 0.1, 0.3),
        (20, -1, 0.0, 1.0, 0.1),
        (33, 29, 0.07, 0.31, 0.05),
    ],
)
def test_a_warmup_stable_decay_schedule_has_maxtexts_rate_at_every_step(
    style: str, steps: int, length: int, warmup: float, decay: float, final: float
) -> None:
    keys = {"steps": steps, "learning_rate_schedule_steps": length, "learning_rate": 2.0}
    keys |= {"warmup_steps_fraction": warmup, "wsd_decay_steps_fraction": decay, "learning_rate_final_fraction": final}
    converted = of_keys(**keys, lr_schedule_type="wsd", wsd_decay_style=style)
    total = length if length > 0 else steps
    expected = [2.0 * warmup_stable_decay(step, total, warmup, decay, style, final) for step in range(steps)]
    np.testing.assert_allclose(rates(converted), expected, atol=2e-6)
    assert not [dropped for dropped in converted.settings.dropped if dropped.line]


@pytest.mark.parametrize(
    "keys",
    [
        {"lr_schedule_type": "wsd", "steps": 1000},
        {"lr_schedule_type": "wsd", "steps": 1000, "wsd_decay_style": "cosine", "warmup_steps_fraction": 0},
        {"lr_schedule_type": "wsd", "steps": 90, "learning_rate_schedule_steps": 77, "wsd_decay_steps_fraction": 0.3},
        {"lr_schedule_type": "wsd", "steps": 90, "warmup_steps_fraction": 0, "wsd_decay_steps_fraction": 1},
        {"steps": 90, "learning_rate_schedule_steps": 77},
    ],
)
def test_a_schedule_goes_back_to_maxtext(keys: dict[str, object]) -> None:
    first = of_keys(**keys)
    back, left = to_maxtext(recipe_with(BASE_RECIPE, first.values))
    assert left == [] and of_keys(**back).values == first.values


def test_fractions_that_maxtext_rejects_are_refused() -> None:
    keys = {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.4, "wsd_decay_steps_fraction": 0.7}
    with pytest.raises(ConfigError, match="Warmup and decay are"):
        of_keys(**keys)
    with pytest.raises(ConfigError, match="wsd_decay_style=sqrt"):
        of_keys(lr_schedule_type="wsd", wsd_decay_style="sqrt")
