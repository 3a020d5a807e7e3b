"""Runs of the same command, and runs whose directory was damaged in between."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any

import pytest

import paxcli as pax
from paxcli.checkpoint.maintenance import verify_checkpoints
from paxcli.errors import ConfigError, DataError, Stopped
from paxcli.mesh import sharding
from paxcli.training.loop import resume_step
from paxcli.training.run_dir import RunDir
from tests.training.runs import evals, losses

_SIZES = {"num_layers": 1, "model_dims": 16, "hidden_dims": 32, "num_heads": 1, "max_seq_len": 16}
_SIZES |= {"global_batch_size": 4, "summary_interval_steps": 1, "warmup_steps": 1}


class Messages:
    """A reporter that keeps messages and facts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}

    def start(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def step(self, record: Any) -> None:
        pass

    def evaluation(self, step: int, metrics: Any) -> None:
        pass

    def message(self, text: str) -> None:
        self.lines.append(text)


def small_recipe(steps: int = 2, **sets: Any) -> pax.Recipe:
    """A very small model. Without evaluation, unless `eval_inputs` is None."""
    values = {**_SIZES, "num_train_steps": steps, "save_interval_steps": 1, "eval_inputs": [], **sets}
    return pax.load("tiny", set={path: value for path, value in values.items() if path != "eval_inputs" or value == []})


def train(run_dir: pathlib.Path, steps: int = 2, progress: Messages | None = None, **sets: Any) -> Messages:
    """Trains a very small model in this process."""
    progress = progress or Messages()
    pax.train(small_recipe(steps, **sets), run_dir, allow_changed=True, progress=progress)
    return progress


def test_the_same_command_is_the_same_run(tmp_path: pathlib.Path) -> None:
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert first.facts["data_seed"] == second.facts["data_seed"] == 1234
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses_of(tmp_path / "c", random_seed=7)


def test_a_finished_run_has_the_result_of_its_last_start(tmp_path: pathlib.Path) -> None:
    """It had no `seconds`."""
    first, again = (pax.train(small_recipe(), tmp_path, progress=Messages()).result for _ in range(2))
    assert first is not None and first["seconds"] > 0 and again == first | {"seconds": 0.0}


def test_the_result_of_a_run_that_ends_earlier_than_it_was_killed_is_of_its_last_step(tmp_path: pathlib.Path) -> None:
    """It had the loss of a lost step."""
    with pytest.raises(_Killed):
        train(tmp_path, 8, Killer(4, False), save_interval_steps=2)
    last = max(pax.Run(tmp_path).steps)
    assert max(losses(tmp_path)) > last
    result = pax.train(small_recipe(last, save_interval_steps=2), tmp_path, allow_changed=True).result
    assert result is not None and (result["steps"], result["loss"]) == (last, losses(tmp_path)[last])


def losses_of(run_dir: pathlib.Path, **sets: Any) -> dict[int, float]:
    train(run_dir, **sets)
    return losses(run_dir)


def test_a_run_that_ends_within_the_warmup_says_so(tmp_path: pathlib.Path) -> None:
    assert "warmup" not in str(train(tmp_path / "a", warmup_steps=2).lines)
    lines = train(tmp_path / "b", warmup_steps=3).lines  # not a warning, since short trial runs are common
    assert str(lines).count("The run ends within its warmup of 3 steps") == 1


def test_a_drawn_seed_is_recorded_and_resumed(tmp_path: pathlib.Path) -> None:
    seed = train(tmp_path / "a", random_seed=None).facts["data_seed"]
    assert seed != train(tmp_path / "b", random_seed=None).facts["data_seed"]
    assert f"task.train.random_seed: {seed}" in (tmp_path / "a" / "recipe.yaml").read_text()
    assert train(tmp_path / "a", steps=3, random_seed=None).facts["data_seed"] == seed


def test_a_resume_without_a_seed_takes_a_seed_of_0_too(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "a", random_seed=0)
    assert "at step 2" in train(tmp_path / "a", steps=3, random_seed=None).lines[0]


def test_a_run_without_a_checkpoint_leaves_no_seed_behind(tmp_path: pathlib.Path) -> None:
    """As after a kill: the next command is a new run, the same as in another directory."""
    train(tmp_path / "a", random_seed=5)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    again = train(tmp_path / "a", random_seed=7)
    assert again.facts["data_seed"] == 7
    assert losses(tmp_path / "a") == losses_of(tmp_path / "b", random_seed=7)


def test_a_warm_start_that_saved_nothing_does_not_start_over_with_random_parameters(tmp_path: pathlib.Path) -> None:
    train(tmp_path / "old")
    recipe, source = small_recipe(4), f"{tmp_path / 'old'}@2"
    pax.train(recipe, tmp_path / "a", init_from=source)
    first = losses(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")  # as after a kill before the first one
    for start in (
        lambda: train(tmp_path / "a"),
        lambda: resume_step(recipe.config, recipe.yaml(), RunDir(tmp_path / "a")),
    ):
        with pytest.raises(ConfigError, match=f"was started with `--from {source}`") as caught:
            start()
        assert f"Add `--from {source}`" in str(caught.value.hint)
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "local.txt").write_text(str(tmp_path / "lost"))  # all were on a lost disk
    with pytest.raises(ConfigError, match="its parameters would be random"):
        train(tmp_path / "a")
    pax.train(recipe, tmp_path / "a", init_from=source)
    assert losses(tmp_path / "a") == first
    assert "at step 4" in train(tmp_path / "a", steps=5).lines[0]
    environment = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert environment["init_from"] == f"--from {source}"


def starts_in(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "goodput.json").read_text())["starts"]


def test_a_run_that_takes_the_optimizer_of_another_starts_at_its_step(tmp_path: pathlib.Path) -> None:
    """It began at step 0 in `goodput.json`; at the last step, it reported that step, and saved nothing."""
    old, run_dir, progress = tmp_path / "old", tmp_path / "a", Messages()
    train(old, steps=3)
    with pytest.raises(ConfigError, match="is at step 3, and this run would have 3: none is left"):
        pax.train(small_recipe(3), run_dir, init_from=old, with_optimizer=True)
    pax.train(small_recipe(5), run_dir, init_from=f"{old}@2", with_optimizer=True, progress=progress)
    assert progress.facts["first_step"] == starts_in(run_dir)[-1]["first_step"] == 2
    assert sorted(losses(run_dir)) == [3, 4, 5]
    shutil.rmtree(run_dir / "checkpoints")  # as after a kill before the first one
    pax.train(small_recipe(5), run_dir, init_from=old, with_optimizer=True)
    assert sorted(losses(run_dir)) == [4, 5]  # without step 3 of the abandoned start


def test_the_records_begin_at_the_step_that_is_really_restored(tmp_path: pathlib.Path) -> None:
    train(tmp_path, steps=4)
    (tmp_path / "checkpoints" / "4" / "manifest" / "metadata").write_text("")
    pax.train(small_recipe(6), tmp_path, allow_changed=True, on_corrupt="previous")
    first, second = starts_in(tmp_path)
    assert (first["last_step"], second["first_step"], second["last_step"]) == (3, 3, 6)
    assert first["seconds"]["lost"] == pytest.approx(first["seconds"]["step"] / 3)  # one of four steps
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_reads_its_checkpoint_if_an_earlier_one_may_take_its_place(tmp_path: pathlib.Path) -> None:
    """It said that it was finished, with one changed bit in its only checkpoint of the last step."""
    train(tmp_path / "a", steps=4)
    assert "is finished" in train(tmp_path / "a", steps=4, on_corrupt="previous").lines[-1]
    file = max((tmp_path / "a/checkpoints/4/state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = train(tmp_path / "a", steps=4, on_corrupt="previous")
    assert "It is now 4.damaged" in again.lines[0] and again.facts["first_step"] == 3
    (result,) = verify_checkpoints(str(tmp_path / "a"), [4])
    assert result.problem is None and sorted(losses(tmp_path / "a")) == [1, 2, 3, 4]


def test_a_run_whose_checkpoints_are_all_local_keeps_their_directory(tmp_path: pathlib.Path) -> None:
    """It started again at step 0, and replaced its metrics."""
    local = {"save_interval_steps": 100, "local_save_interval_steps": 1, "local_directory": str(tmp_path / "local")}
    train(tmp_path / "a", steps=3, **local)
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "3")  # as after a kill
    for changed in ({"local_save_interval_steps": None, "local_directory": None}, {"local_directory": "elsewhere"}):
        with pytest.raises(ConfigError, match=r"(?s)another recipe.*checkpoint.local_directory: .*/local"):
            train(tmp_path / "a", steps=4, **local | changed)
    assert sorted(losses(tmp_path / "a")) == [1, 2, 3]


def test_a_checkpoint_has_all_that_a_resume_needs(tmp_path: pathlib.Path) -> None:
    seed = train(tmp_path / "a", random_seed=None).facts["data_seed"]
    for name in ("config.txt", "recipe.yaml", "environment.json"):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(ConfigError, match=r"(?s)started with another recipe.*clip_gradient_norm"):
        pax.train(
            pax.load("tiny", set={**_SIZES, "eval_inputs": [], "clip_gradient_norm_to_value": 0.5}), tmp_path / "a"
        )
    assert train(tmp_path / "a", steps=3, random_seed=None).facts["data_seed"] == seed


@pytest.mark.parametrize("content", [b"", b"task.model.dtype = flo", b"a = 1\n\xff\xfe", b"a = " + b"[" * 100_000])
def test_a_damaged_config_is_unusable_data_with_a_way_out(tmp_path: pathlib.Path, content: bytes) -> None:
    train(tmp_path / "a")
    (tmp_path / "a" / "config.txt").write_bytes(content)
    with pytest.raises(DataError, match="config.txt is damaged") as caught:
        train(tmp_path / "a", steps=3)
    assert "delete it" in str(caught.value.hint)
    (tmp_path / "a" / "config.txt").unlink()
    assert "at step 2" in train(tmp_path / "a", steps=3).lines[0]


def test_a_manifest_without_a_recipe_can_be_read(tmp_path: pathlib.Path) -> None:
    """As version 0.1.0 wrote it."""
    from paxcli.checkpoint.manifest import _checksum

    train(tmp_path / "a")
    (tmp_path / "a" / "config.txt").unlink()
    file = tmp_path / "a" / "checkpoints" / "2" / "manifest" / "metadata"
    content = json.loads(file.read_text())["content"]
    assert content.pop("recipe")["task.model.model_dims"] == 16
    content["format"], content["input_states"] = 1, [content["input_states"][0]["train"]]
    file.write_text(json.dumps({"checksum": _checksum(content), "content": content}))
    assert train(tmp_path / "a", steps=3).lines[:-1] == [f"Resuming {tmp_path / 'a'} at step 2."]


@pytest.mark.slow
def test_a_checkpoint_without_positions_of_eval_inputs_can_be_resumed(tmp_path: pathlib.Path) -> None:
    from paxcli.checkpoint.manifest import _checksum

    train(tmp_path / "a", **_CONTINUED)
    file = tmp_path / "a" / "checkpoints" / "2" / "manifest" / "metadata"
    content = json.loads(file.read_text())["content"]
    assert content["input_states"][0].keys() == {"train", "eval/stdlib", "evaluated"}
    del content["input_states"][0]["eval/stdlib"]
    file.write_text(json.dumps({"checksum": _checksum(content), "content": content}))
    lines = train(tmp_path / "a", steps=3, **_CONTINUED).lines[:-1]  # without that of goodput
    assert lines[1:] == ["Input `stdlib` starts at its beginning: the checkpoint has no position of it."]
    changed = {**_CONTINUED, "eval_inputs.0.eval_loop_num_batches": 2}
    lines = train(tmp_path / "a", steps=4, **changed).lines[:-1]
    assert lines[1:] == ["Input `stdlib` starts at its beginning: `eval_inputs.0.eval_loop_num_batches` changed."]


# Each evaluation reads the rows after those of the one before it.
_CONTINUED = {"eval_inputs": None, "eval_inputs.0.reset_for_eval": False, "eval_inputs.0.eval_loop_num_batches": 3}


class Signaller(Messages):
    """Sends SIGTERM to this process before evaluation batch number `at`, counted over all evaluations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int):
        super().__init__()
        self.batches = 0
        real = sharding.put_batch

        def put_batch(*arguments: Any) -> Any:
            self.batches += 1
            if self.batches == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments)

        monkeypatch.setattr("paxcli.training.evaluate.put_batch", put_batch)


def test_a_signal_during_an_evaluation_saves_and_stops_between_batches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is made up for when the run resumes, also that of the last step, with the same metrics."""
    several = {**_CONTINUED, "save_interval_steps": 100, "eval_interval_steps": 2}
    several["eval_inputs.0.eval_loop_num_batches"] = 6
    train(tmp_path / "straight", steps=4, **several)
    for stopped_at, batch in ((2, 2), (4, 6 + 2)):
        with (
            monkeypatch.context() as patched,
            pytest.raises(Stopped, match=f"saved at step {stopped_at} of 4, without"),
        ):
            train(tmp_path / "a", 4, Signaller(patched, batch), **several)
        assert pax.Run(tmp_path / "a").steps[-1] == stopped_at and stopped_at not in evals(tmp_path / "a")
    recipe, run_dir = small_recipe(4, **several), RunDir(tmp_path / "a")
    assert resume_step(recipe.config, recipe.yaml(), run_dir) == (4, False)  # not finished, as it said
    assert "at step 4" in train(tmp_path / "a", steps=4, **several).lines[0]
    assert evals(tmp_path / "a") == evals(tmp_path / "straight") and evals(tmp_path / "a").keys() == {2, 4}
    assert losses(tmp_path / "a") == losses(tmp_path / "straight")
    assert "is finished" in train(tmp_path / "a", steps=4, **several).lines[0]
    assert resume_step(recipe.config, recipe.yaml(), run_dir) == (4, True)


def _lines(run_dir: pathlib.Path) -> list[str]:
    """The lines of `metrics.jsonl` without the figures of speed and memory, which differ from run to run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    unstable = (
        "step_seconds",
        "tokens_per_second",
        "mfu",
        "input_wait_seconds",
        "peak_memory_bytes",
        "seconds_left",
        "goodput",
    )
    return [json.dumps({name: value for name, value in line.items() if name not in unstable}) for line in lines]


class _Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


class Killer(Messages):
    """Ends the run at a step, or right after the evaluation of that step."""

    def __init__(self, step: int, in_evaluation: bool):
        super().__init__()
        self.kills_at = {"evaluation" if in_evaluation else "step": step}

    def step(self, record: Any) -> None:
        if record.step == self.kills_at.get("step"):
            raise _Killed

    def evaluation(self, step: int, metrics: Any) -> None:
        if step == self.kills_at.get("evaluation"):
            raise _Killed


def test_a_dry_run_counts_local_steps_only_with_a_local_tier(tmp_path: pathlib.Path) -> None:
    """It said that the run resumes at its last local step, and the run resumed at its own last checkpoint."""
    tier = {"local_save_interval_steps": 1, "local_directory": str(tmp_path / "local")}
    with pytest.raises(_Killed):
        train(tmp_path / "a", 8, Killer(6, False), save_interval_steps=4, **tier)
    for changed in (tier, {"local_save_interval_steps": None, "local_directory": None}):
        recipe = small_recipe(8, save_interval_steps=4, **tier | changed)
        would = resume_step(recipe.config, recipe.yaml(), RunDir(tmp_path / "a"), allow_changed=True)
        assert would[0] > 4 if changed is tier else would == (4, False)
    assert "at step 4" in train(tmp_path / "a", 8, save_interval_steps=4).lines[0]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_run_that_ends_with_a_local_checkpoint_has_it_in_its_directory(
    tmp_path: pathlib.Path, evaluates: bool
) -> None:
    """It was finished, and its own last checkpoint, which evaluation and export read, was an earlier one."""
    each = {"save_interval_steps": 4, "local_save_interval_steps": 1, "local_directory": str(tmp_path / "local")}
    each |= _CONTINUED if evaluates else {}
    train(tmp_path / "straight", 8, save_interval_steps=1, **(_CONTINUED if evaluates else {}))
    with pytest.raises(_Killed):
        train(tmp_path / "a", 8, Killer(7, False), **each)
    recipe = small_recipe(8, **each)
    last, _ = resume_step(recipe.config, recipe.yaml(), RunDir(tmp_path / "a"))
    assert last is not None and last > 4
    recipe = small_recipe(last, **each)
    assert resume_step(recipe.config, recipe.yaml(), RunDir(tmp_path / "a"), allow_changed=True) == (last, False)
    train(tmp_path / "a", last, **each)
    assert pax.Run(tmp_path / "a").steps == [4, last] and not any((tmp_path / "local").rglob("shards.npz"))
    train(tmp_path / "a", 8, **each)  # from the same position of the data
    assert losses(tmp_path / "a") == losses(tmp_path / "straight")


def test_every_line_of_an_interrupted_run_is_that_of_an_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    """Killed before and after an evaluation, at steps with and without a checkpoint."""
    each = {**_CONTINUED, "steps": 6, "eval_interval_steps": 2, "save_interval_steps": 2}
    train(tmp_path / "straight", **each)
    run_dir = tmp_path / "a"
    for killed_at, in_evaluation in ((3, False), (4, True)):
        with pytest.raises(_Killed):
            train(run_dir, progress=Killer(killed_at, in_evaluation), **each)
    assert "at step 4" in train(run_dir, **each).lines[0]
    assert _lines(run_dir) == _lines(tmp_path / "straight")
    assert len({metrics["loss"] for metrics in evals(run_dir).values()}) == 3


def test_a_run_that_ended_and_is_extended_evaluates_the_next_batches(tmp_path: pathlib.Path) -> None:
    """Its last checkpoint was saved after the evaluation, by an early stop, or before it, at the last step."""
    each = {**_CONTINUED, "learning_rate": 0.0, "save_interval_steps": 100}
    train(tmp_path / "straight", steps=3, eval_interval_steps=1, **each)
    run_dir = tmp_path / "a"
    train(run_dir, steps=4, eval_interval_steps=2, **each, **{"early_stopping_fn.target": 100.0})
    assert evals(run_dir).keys() == {2}
    for steps in (3, 4):
        train(run_dir, steps, eval_interval_steps=2, **each)
    found, expected = ([line["loss"] for line in evals(path).values()] for path in (run_dir, tmp_path / "straight"))
    assert evals(run_dir).keys() == {2, 3, 4} and found == expected


class Crash(Messages):
    """Ends the run at a step, without a checkpoint of it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, record: Any) -> None:
        if record.step == self.at:
            raise RuntimeError("crash")


def test_goodput_covers_the_wall_time_over_restarts(tmp_path: pathlib.Path) -> None:
    begin = time.time()
    with pytest.raises(RuntimeError, match="crash"):
        train(tmp_path, 9, Crash(at=6), save_interval_steps=4)
    lines = train(tmp_path, 9, save_interval_steps=4).lines
    report = json.loads((tmp_path / "goodput.json").read_text())
    first, second = report["starts"]
    assert first["ended"] >= begin and second["ended"] <= time.time()
    assert sum(report["seconds"].values()) == pytest.approx(second["ended"] - first["began"], abs=1e-4)
    assert (first["last_step"], second["first_step"], second["last_step"]) == (4, 4, 9)
    assert first["seconds"]["lost"] > 0 < report["seconds"]["stopped"] and second["seconds"]["lost"] == 0
    assert all(start["seconds"][cause] > 0 for start in (first, second) for cause in ("step", "compile", "save"))
    assert first["seconds"]["restore"] == 0 < second["seconds"]["restore"]
    assert lines[-1].startswith("goodput ") and "lost" in lines[-1]
    logged = pax.Run(tmp_path).metrics()["goodput"]
    assert len(logged) == 9 and ((logged > 0) & (logged < 1)).all()
    pax.Run(tmp_path).plot(metrics=["goodput"], path=tmp_path / "goodput.svg")
