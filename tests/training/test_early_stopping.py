"""Runs that end by a metric of their evaluations."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import fiddle as fdl
import pytest
from typer.testing import CliRunner

import paxcli as pax
from paxcli.cli.main import app
from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.training.early_stopping import EarlyStopping
from paxcli.training.validate import validate
from tests.training.runs import evals, losses
from tests.training.test_loop import Messages, small_recipe


@pytest.mark.parametrize(
    ("rule", "values", "reason"),
    [
        (EarlyStopping(), {5: 0.0}, None),
        (EarlyStopping(target=2.69), {5: 3.0, 10: 2.7}, None),
        (EarlyStopping(target=2.69), {5: 3.0, 10: 2.69, 15: 4.0}, "log_pplx reached 2.6900 at step 10 (target 2.69)"),
        (EarlyStopping(metric="accuracy", target=0.5, maximize=True), {5: 0.4}, None),
        (
            EarlyStopping(metric="accuracy", target=0.5, maximize=True),
            {5: 0.6},
            "accuracy reached 0.6000 at step 5 (target 0.5)",
        ),
        (EarlyStopping(patience=2), {5: 3.0, 10: 3.1, 15: 2.9, 20: 2.9}, None),
        (
            EarlyStopping(patience=2),
            {20: 2.9, 5: 3.0, 10: 2.8, 15: 2.9},
            "log_pplx has not improved in 2 evaluations, since step 10",
        ),
    ],
)
def test_reasons(rule: EarlyStopping, values: dict[int, float], reason: str | None) -> None:
    lines = [{"step": step, "split": "eval/a", rule.metric: values[step]} for step in sorted(values)]
    others = [{"step": 1, "split": "train"}, {"step": 1, "split": "eval/a", rule.metric: None}]
    others += [{"step": 99, "split": "eval/a", rule.metric: -1.0 if not rule.maximize else 9.0}]
    assert rule.reason([*lines, *others], last_step=50) == reason
    assert dataclasses.replace(rule, input="b").reason(lines, last_step=50) is None


def recipe(**sets: Any) -> pax.Recipe:
    values = {"eval_inputs": None, "eval_interval_steps": 2, "save_interval_steps": 100, "summary_interval_steps": 3}
    values |= {"eval_inputs.0.reset_for_eval": False, "eval_inputs.0.eval_loop_num_batches": 1}
    return small_recipe(40, **values, **sets)


def run(run_dir: pathlib.Path, **sets: Any) -> tuple[dict[str, Any], list[str]]:
    progress = Messages()
    result = pax.train(recipe(**sets), run_dir, allow_changed=True, progress=progress).result
    assert result is not None
    return result, progress.lines


def test_a_run_ends_at_its_target_and_is_finished(tmp_path: pathlib.Path) -> None:
    result, lines = run(tmp_path, **{"early_stopping_fn.target": 5.0})
    steps = sorted(evals(tmp_path))
    reached = [step for step in steps if evals(tmp_path)[step]["log_pplx"] <= 5.0]
    assert reached == [steps[-1]] and 2 < reached[0] < 40
    assert result["steps"] == reached[0] == pax.Run(tmp_path).steps[-1]
    (ended,) = [line for line in lines if line.startswith("Stopping early: log_pplx reached 4.")]
    assert ended.endswith(f"Saved at step {reached[0]}.")

    before = losses(tmp_path)
    again, lines = run(tmp_path, **{"early_stopping_fn.target": 5.0})
    assert again["steps"] == reached[0] and losses(tmp_path) == before
    assert "is finished: log_pplx reached" in lines[-1]
    assert list(pax.Run(tmp_path).watch()) == [reached[0]]

    told = CliRunner().invoke(app, ["train", str(tmp_path), "--dry-run", "--json"]).stdout
    assert json.loads(told)["would"] == "do nothing: the run is finished"

    more, _ = run(tmp_path, **{"early_stopping_fn.target": None, "num_train_steps": reached[0] + 2})
    assert more["steps"] == reached[0] + 2
    assert {step: losses(tmp_path)[step] for step in before} == before


def test_an_evaluation_that_is_repeated_after_a_kill_counts_once(tmp_path: pathlib.Path) -> None:
    """The line of its first input was there already: the value was its own "no improvement", and the run ended."""
    rule = {"early_stopping_fn.patience": 1, "early_stopping_fn.input": "stdlib"}
    source = pax.load("tiny").config.eval_inputs[0]
    source.reset_for_eval, source.eval_loop_num_batches = False, 1

    def train(steps: int) -> dict[str, Any]:
        loaded = recipe(num_train_steps=steps, **rule)
        loaded.config.eval_inputs.append(fdl.copy_with(source, name="other", batch_size=2))
        result = pax.train(loaded, tmp_path, allow_changed=True, progress=Messages()).result
        assert result is not None
        return result

    assert train(4)["steps"] == 4
    *kept, last = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"split": "eval/other"' in last
    (tmp_path / "metrics.jsonl").write_text("".join(kept))  # as a SIGKILL between the two lines
    assert train(6)["steps"] == 6


def test_an_unknown_input_or_metric_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="an evaluation has no metric `f1`"):
        run(tmp_path, **{"early_stopping_fn.target": 1.0, "early_stopping_fn.metric": "f1"})
    config = recipe(**{"early_stopping_fn.target": 1.0, "early_stopping_fn.input": "test"}).config
    with pytest.raises(ConfigError, match="early_stopping_fn.input=test is not one of the eval inputs: "):
        validate(config)


@pytest.mark.parametrize("overlay", [(), ("synthetic-data",)])
def test_gpt3_of_pax_stops_at_its_target(overlay: tuple[str, ...]) -> None:
    config = resolve("C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas", overlay, {}).config
    assert config.task.early_stopping_fn.target == (None if overlay else 2.69)
    validate(config, reads_data=False)
