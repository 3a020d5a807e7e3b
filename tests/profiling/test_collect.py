"""Collecting and applying on this machine's devices: everything but what only a GPU can say."""

from __future__ import annotations

import json
import os
import sys

import jax
import pytest
from jax import monitoring

from paxcli.cli.pgle import _comparison
from paxcli.config.resolve import resolve
from paxcli.errors import DataError, MissingError
from paxcli.profiling import apply, collect, compare, runner
from paxcli.profiling.costs import encode
from paxcli.profiling.xla_log import XlaLog
from paxcli.training.run_dir import RunDir
from tests.training.runs import small

SETS = [option.removeprefix("--set=") for option in small(eval_interval_steps=None)]
USED = "I1121 02:30:40.859288 19779 gpu_hlo_schedule.cc:579] Using PGLE profile for module from fdo_profile (binary)\n"


@pytest.fixture
def recipe(monkeypatch):
    """A small recipe, on devices that are taken for ones that give profiles."""
    monkeypatch.setattr(runner, "require_profile_device", lambda config: None)
    monkeypatch.setattr(RunDir, "lock", lambda self: None)  # it lasts until the process ends
    monkeypatch.setattr(apply, "require_profile_device", lambda config: None)
    return resolve("tiny", (), SETS).config


def test_a_profile_and_its_manifest_are_written(recipe, monkeypatch, tmp_path):
    costs = iter([1.0, 5.0, 2.0])
    monkeypatch.setattr(collect, "get_profiled_instructions_proto", lambda _: encode({"fp::dot.1": next(costs)}))
    run_dir = RunDir(tmp_path / "run")
    found = collect.collect(recipe, run_dir, steps=3, warmup=1, percentile=50)
    assert (found["steps"], found["instructions"], found["total_microseconds"]) == (3, 1, 2.0)
    assert sorted(os.listdir(run_dir.profile)) == ["manifest.json", "profile.pb", "profile.pbtxt"]
    assert json.loads((run_dir.profile / "manifest.json").read_text())["percentile"] == 50
    assert apply.load_costs(recipe, run_dir) == {"fp::dot.1": 2.0}
    recipe.task.train.learner.learning_rate = 7.0
    with pytest.raises(DataError, match="learning_rate: 0.001 → 7.0"):
        apply.load_costs(recipe, run_dir)


def test_a_device_without_costs_leaves_no_file(recipe, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(MissingError, match="no costs in 2 steps"):
        collect.collect(recipe, run_dir, steps=2, warmup=1, percentile=90)
    assert not run_dir.profile.exists()


def test_the_compiler_takes_the_options_of_both_halves():
    program = jax.jit(lambda x: x + 1).lower(1.0)
    for options in (collect.COLLECT_OPTIONS, apply.profile_options({"dot.1": 1.0})):
        assert program.compile(compiler_options=options)(1.0) == 2.0


def test_what_xla_says_is_heard_and_the_rest_passes(capfd):
    with XlaLog() as log:
        os.write(2, USED.encode() + b"E1121 02:30:40.859288 1 x.cc:1] real trouble\n")
        print("from Python", file=sys.stderr)
        assert log.wait_for("Using PGLE profile") == USED.rstrip()
        assert log.wait_for("something else", seconds=0.1) is None
    print("afterwards", file=sys.stderr)
    passed = capfd.readouterr().err
    assert all(text in passed for text in ("real trouble", "from Python", "afterwards")) and "PGLE" not in passed


def test_a_profile_that_xla_did_not_take_is_an_error():
    log = XlaLog()
    log.wait_for = lambda text: None
    with pytest.raises(DataError, match="did not use"):
        apply.compile_with_costs({"dot.1": 1.0}, log, lambda: None)


def test_a_program_that_was_kept_is_proof_too():
    def from_cache() -> str:
        monitoring.record_event("/jax/compilation_cache/cache_hits")
        return "program"

    log = XlaLog()
    log.wait_for = lambda text: pytest.fail("XLA says nothing of a program that it does not compile")
    assert apply.compile_with_costs({"dot.1": 1.0}, log, from_cache) == "program"


@pytest.mark.parametrize(("name", "fits"), [("aa11::dot.1", True), ("dot.1", True), ("bb22::dot.1", False)])
def test_a_profile_of_another_program_is_an_error(name, fits):
    hlo = 'HloModule jit_train_step, frontend_attributes={fingerprint_before_lhs="aa11"}'
    if fits:
        apply.require_same_program(hlo, {name: 1.0})
    else:
        with pytest.raises(DataError, match="program bb22; this recipe compiles to aa11"):
            apply.require_same_program(hlo, {name: 1.0})


@pytest.mark.slow
def test_with_and_without_a_profile_take_turns(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(collect, "get_profiled_instructions_proto", lambda _: encode({"dot.1": 1.0}))
    log = XlaLog()
    log.wait_for = lambda text: USED
    found = compare.compare(recipe, RunDir(tmp_path / "run"), steps=2, warmup=1, percentile=90, xla_log=log)
    assert found["speedup"] == found["before"]["median_step_seconds"] / found["after"]["median_step_seconds"]
    for name in ("before", "after"):
        assert found[name]["steps"] == 10 and found[name]["exposed_communication"] == 0
        assert found[name]["trace"].startswith(str(tmp_path / "run" / "profile" / name))
    assert "speedup" in _comparison(found, "tiny")
