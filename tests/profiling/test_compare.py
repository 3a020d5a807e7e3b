"""Comparing steps with and without a profile."""

from __future__ import annotations

import pytest

from paxcli.cli.pgle import _comparison
from paxcli.profiling import collect, compare
from paxcli.profiling.costs import encode
from paxcli.profiling.xla_log import XlaLog
from paxcli.training.run_dir import RunDir


@pytest.mark.slow
def test_rounds_with_and_without_a_profile_alternate(recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(collect, "get_profiled_instructions_proto", lambda _: encode({"dot.1": 1.0}))
    log = XlaLog()
    log.wait_for = lambda text: "I1121 02:30:40.859288 1 x.cc:1] Using PGLE profile"
    found = compare.compare(recipe, RunDir(tmp_path / "run"), steps=2, warmup=1, percentile=90, xla_log=log)
    assert found["speedup"] == found["before"]["median_step_seconds"] / found["after"]["median_step_seconds"]
    for name in ("before", "after"):
        assert found[name]["steps"] == 10 and found[name]["exposed_communication"] == 0
        assert found[name]["trace"].startswith(str(tmp_path / "run" / "profile" / name))
    assert "speedup" in _comparison(found, "tiny")
