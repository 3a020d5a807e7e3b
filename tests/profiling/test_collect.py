"""Collecting profiles on this machine's devices: everything that needs no GPU."""

from __future__ import annotations

import json
import os

import jax
import pytest

from paxcli.errors import DataError, MissingError
from paxcli.profiling import apply, collect
from paxcli.profiling.costs import encode
from paxcli.training.run_dir import RunDir


def test_a_profile_and_its_manifest_are_written(recipe, monkeypatch, tmp_path):
    costs = iter([1.0, 5.0, 2.0])
    monkeypatch.setattr(collect, "get_profiled_instructions_proto", lambda _: encode({"fp::dot.1": next(costs)}))
    run_dir = RunDir(tmp_path / "run")
    found = collect.collect(recipe, run_dir, steps=3, warmup=1, percentile=50)
    assert (found["steps"], found["instructions"], found["total_microseconds"]) == (3, 1, 2.0)
    assert sorted(os.listdir(run_dir.profile)) == ["manifest.json", "profile.pb", "profile.pbtxt"]
    assert json.loads((run_dir.profile / "manifest.json").read_text())["percentile"] == 50
    assert apply.load_costs(recipe, run_dir) == {"fp::dot.1": 2.0}
    before, recipe.task.train.learner.learning_rate = recipe.task.train.learner.learning_rate, 7.0
    with pytest.raises(DataError, match=f"learning_rate: {before} → 7.0"):
        apply.load_costs(recipe, run_dir)


def test_a_device_without_costs_leaves_no_file(recipe, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(MissingError, match="no costs in 2 steps"):
        collect.collect(recipe, run_dir, steps=2, warmup=1, percentile=90)
    assert not run_dir.profile.exists()


def test_the_compiler_accepts_the_options_of_collect_and_apply():
    program = jax.jit(lambda x: x + 1).lower(1.0)
    for options in (collect.COLLECT_OPTIONS, apply.profile_options({"dot.1": 1.0})):
        assert program.compile(compiler_options=options)(1.0) == 2.0
