"""The order in which settings are tried. Their reports are made up here; compiling takes minutes."""

from __future__ import annotations

import pytest

from paxcli.config.resolve import resolve
from paxcli.errors import ConfigError
from paxcli.programs import search as searching
from paxcli.programs.ahead_of_time import Compiled
from paxcli.programs.search import search
from paxcli.programs.topologies import find_compile_target
from paxcli.training.experiment import global_batch_size


def made_up(config, target) -> Compiled:
    """Devices of 40 bytes: a row needs one, saving everything eight more; a tensor axis of 2 is fastest."""
    tensor = config.mesh.ici_mesh_shape["tensor"] if isinstance(config.mesh.ici_mesh_shape, dict) else 1
    everything = config.task.model.stack.remat_policy == "everything"
    rows = global_batch_size(config, 4) / 4
    needed = rows + 8 * everything
    speed = rows * (2 if tensor == 2 else 1) * (3 if everything else 1)
    return Compiled({"fits": needed <= 40, "hbm_needed_bytes": needed, "predicted_tokens_per_second": speed}, "")


def test_each_setting_is_tried_with_the_best_earlier_ones(monkeypatch) -> None:
    monkeypatch.setattr(searching, "compile_ahead", made_up)
    trials = []
    ranked = search(resolve("c4-1b").config, find_compile_target("v4-8"), trials.append)
    assert trials[0].settings == {} and len(trials) == len(ranked) > 10
    best = ranked[0].settings
    assert best["mesh.ici_mesh_shape"] == {"fsdp": 2, "tensor": 2}
    assert best["task.model.stack.remat_policy"] == "everything"
    assert "task.train.percore_batch_size" not in best  # 64 rows do not fit, and 16 are slower
    fits = [one.report["fits"] for one in ranked]
    assert fits == sorted(fits, reverse=True) and not all(fits)


def test_settings_that_fit_are_found_for_a_recipe_that_does_not(monkeypatch) -> None:
    monkeypatch.setattr(searching, "compile_ahead", made_up)
    config = resolve("c4-1b", (), ["percore_batch_size=64"]).config
    ranked = search(config, find_compile_target("v4-8"))
    assert ranked[0].report["fits"] and ranked[0].settings["task.train.percore_batch_size"] == 32


def test_one_device_has_one_mesh(monkeypatch) -> None:
    monkeypatch.setattr(searching, "compile_ahead", made_up)
    ranked = search(resolve("tiny-synthetic").config, find_compile_target("v5e-1"))
    assert len(ranked) > 10 and not any("mesh.ici_mesh_shape" in one.settings for one in ranked)


def test_nothing_is_ranked_without_a_prediction() -> None:
    with pytest.raises(ConfigError, match="no step-time prediction"):
        search(resolve("c4-1b").config, find_compile_target("cpu:4"))
