"""Runs that diverge: what is saved, what is kept, and when they end."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import pytest

import paxcli as pax
from paxcli.errors import DivergedError
from paxcli.inference.trained import TrainedRun
from paxcli.metrics.meter import Record
from paxcli.training.divergence import DivergenceCheck
from paxcli.training.learner import Learner
from tests.training.test_loop import small_recipe, train

NAN = float("nan")


def record(step: int, skipped: int, loss: float = 1.0, grad_norm: float = 1.0, param_norm: float = 1.0) -> Record:
    values = {"loss": loss, "grad_norm": grad_norm, "param_norm": param_norm, "skipped_steps": skipped}
    return Record(step, values)  # pyrefly: ignore


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_parameters_that_are_not_finite_are_never_saved(tmp_path: pathlib.Path) -> None:
    """And the last sound checkpoint stays, with `save_max_to_keep=1`, through every restart."""
    train(tmp_path / "a", steps=1, save_max_to_keep=1)
    for _ in range(2):
        with pytest.raises(DivergedError, match="parameters after step 2 are not finite"):
            train(tmp_path / "a", steps=9, save_max_to_keep=1, learning_rate=1e40)
        assert pax.Run(tmp_path / "a").steps == [1]


def test_one_skipped_step_is_no_divergence_though_it_is_logged() -> None:
    check = DivergenceCheck(Learner(), 0, 0)
    check.check_record(record(1, skipped=1, loss=NAN, grad_norm=NAN))
    check.check_record(record(2, skipped=1))
    with pytest.raises(DivergedError, match="loss of step 3"):
        check.check_record(record(3, skipped=2, loss=NAN, grad_norm=NAN, param_norm=NAN))
    with pytest.raises(DivergedError, match="loss of step 1"):
        DivergenceCheck(Learner(skip_invalid_gradients=False), 0, 0).check_record(
            record(1, skipped=1, loss=NAN, grad_norm=NAN)
        )


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    check = DivergenceCheck(Learner(max_consecutive_skips=15), 30, 4)
    check.check_record(record(40, skipped=14))
    check.check_record(record(50, skipped=23))  # one of ten updated
    check.check_record(record(60, skipped=33))
    with pytest.raises(DivergedError, match="last 20 steps up to step 70"):
        check.check_record(record(70, skipped=43))
    DivergenceCheck(Learner(max_consecutive_skips=None), 0, 0).check_record(record(10**6, skipped=10**6))


def test_skipped_steps_before_a_resume_count(tmp_path: pathlib.Path) -> None:
    """A run that was stopped more often than its limit of skipped steps never ended."""
    lines = [record(step, skipped).values | {"step": step} for step, skipped in ((1, 0), (10, 5), (20, 15), (30, 25))]
    check = DivergenceCheck(Learner(max_consecutive_skips=25), 33, 28, [*lines, {"step": 5, "loss": 1.0}])
    check.check_record(record(34, skipped=29))
    with pytest.raises(DivergedError, match="last 25 steps up to step 35"):
        check.check_record(record(35, skipped=30))
    skips = {"skip_step_gradient_norm_value": 1e-9, "max_consecutive_skips": 5}
    train(tmp_path / "a", steps=4, **skips)
    with pytest.raises(DivergedError, match="last 5 steps up to step 6 were skipped"):
        train(tmp_path / "a", steps=9, **skips)


def test_a_resume_between_reports_counts_skipped_steps_as_the_run_would_have() -> None:
    """It counted from the checkpoint, and ended a run whose next report had an update."""
    learner, records = Learner(max_consecutive_skips=8), [record(5, 0), record(10, 3), record(15, 8), record(20, 12)]
    straight = DivergenceCheck(learner, 0, 0)
    resumed = DivergenceCheck(learner, 7, 0, [records[0].values | {"step": 5}])
    for check, reports in ((straight, records), (resumed, records[1:])):
        for one in reports:
            check.check_record(one)


def test_a_run_whose_steps_are_all_skipped_ends_and_keeps_sound_checkpoints(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DivergedError, match="last 3 steps up to step 3 were skipped"):
        train(tmp_path / "a", steps=9, skip_step_gradient_norm_value=1e-9, max_consecutive_skips=3)
    assert pax.Run(tmp_path / "a").steps == [1, 2]


def test_an_evaluation_whose_loss_is_not_finite_is_a_divergence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "a", steps=1)
    run = pax.Run(tmp_path / "a", small_recipe(eval_inputs=None))
    params = run.params()
    params["embedding"]["table"] = params["embedding"]["table"].at[:].set(jnp.nan)
    monkeypatch.setattr(TrainedRun, "params", lambda self, step: params)
    with pytest.raises(DivergedError, match="checkpoint of step 1 .* is nan"):
        run.evaluate()
    assert not json.loads(
        (tmp_path / "a" / "eval" / "1.json").read_text() if (tmp_path / "a" / "eval").exists() else "0"
    )
