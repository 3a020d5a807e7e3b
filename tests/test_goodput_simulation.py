"""The simulation of checkpoint cadences agrees with the closed formulas where they hold."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import goodput_simulation as simulation

MINUTE, HOUR = 60.0, 3600.0


def job(mtbf: float, save: float, restart: float = 600.0, **more: float) -> simulation.Job:
    """A job with steps of one second and the bucket as its only tier."""
    values = {"local_save": 0.0, "local_restore": 0.0, "local_survival": 0.0, "bucket_restore": 0.0, **more}
    return simulation.Job(mtbf, 1.0, bucket_save=save, restart=restart, **values)


@pytest.mark.parametrize(("mtbf", "published"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_dalys_formula_gives_his_own_figures(mtbf, published):
    assert simulation.daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(published, abs=0.5)


@pytest.mark.parametrize("mtbf", [24 * HOUR, 3 * HOUR, 0.5 * HOUR])
@pytest.mark.parametrize("interval", [300, 1200, 3600])
def test_one_tier_has_the_goodput_of_dalys_exact_model(mtbf, interval):
    found = simulation.simulate(job(mtbf, 60.0), np.array([interval]), np.array([1]), 40_000, 0).goodput[0]
    assert found == pytest.approx(simulation.exact_goodput(interval, 60.0, 600.0, mtbf), rel=0.02)


@pytest.mark.parametrize("mtbf", [24 * HOUR, 3 * HOUR])
def test_the_best_cadence_of_one_tier_is_dalys(mtbf):
    one = job(mtbf, 60.0)
    best = simulation.best_bucket_cadence(one, 20_000, 1)
    formula = simulation.daly(60.0, mtbf)
    assert best["bucket_interval_steps"] == pytest.approx(formula, rel=0.35)  # the optimum is flat
    assert best["goodput"] == pytest.approx(simulation.exact_goodput(formula, 60.0, 600.0, mtbf), rel=0.01)


def test_two_tiers_have_youngs_cadences_where_failures_are_rare():
    two = job(24 * HOUR, 60.0, local_save=2.0, local_restore=2.0, bucket_restore=60.0, local_survival=0.8)
    best = simulation.best_cadence(two, 20_000, 0)
    local, bucket = simulation.young(2.0, 24 * HOUR / 0.8), simulation.young(60.0, 24 * HOUR / 0.2)
    saves = round(bucket / local)
    at_formula = simulation.simulate(two, np.array([round(local)]), np.array([saves]), 20_000, 0).goodput[0]
    assert best["goodput"] == pytest.approx(at_formula, abs=0.002)
    assert best["goodput"] > simulation.best_bucket_cadence(two, 20_000, 0)["goodput"]


def test_every_second_has_one_cause():
    two = job(2 * HOUR, 60.0, local_save=2.0, local_restore=2.0, bucket_restore=60.0, local_survival=0.5)
    result = simulation.simulate(two, np.array([50, 200]), np.array([10, 3]), 2000, 0)
    assert sum(result) == pytest.approx(np.ones(2))
    assert all((share > 0).all() for share in result)


def test_the_script_prints_plans_and_repeats_them():
    command = [sys.executable, simulation.__file__, "--chips", "1", "16384", "50000", "--samples", "300"]
    texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert texts[0] == texts[1]
    plans = json.loads(texts[0])["plans"]
    assert [plan["chips"] for plan in plans] == [1, 16384, 50000]
    assert plans[1]["mtbf_hours"] == pytest.approx(54 * 24 / 419, abs=0.01)  # as Meta published it
    goodputs = [plan["two_tiers"]["goodput"] for plan in plans]
    assert 1 > goodputs[0] > goodputs[1] > goodputs[2] > 0.5
