"""PGLE and JAX's automatic mode on a GPU: `pytest -m gpu tests/profiling`."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.gpu

# One GPU has nothing to exchange, but shows that costs are measured and used.
RECIPE = ("tiny-synthetic", "--set=num_train_steps=40", "--set=eval_interval_steps=null", "--set=eval_inputs=[]")
ON_GPU = {"JAX_PLATFORMS": "cuda"}


def test_a_profile_is_collected_and_used(pax, tmp_path):
    done = pax("pgle-profile", *RECIPE, "--run-dir=run", "--json", env=ON_GPU)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["instructions"] > 10 and measured["total_microseconds"] > 0
    assert any(word in one["name"] for one in measured["costliest"] for word in ("gemm", "fusion", "custom-call"))
    assert "by the costs of" in done.stderr
    assert measured["speedup"] > 0.9

    shown = pax("pgle", "show", "run/profile/profile.pbtxt", "--json")
    assert json.loads(shown.stdout)["instructions"] == measured["instructions"]
    trained = pax("pgle", "apply", *RECIPE, "--run-dir=run", "--json", env=ON_GPU)
    assert trained.returncode == 0 and "by the costs of" in trained.stderr, trained.stderr
    stale = pax("pgle", "apply", *RECIPE, "--set=num_layers=2", "--run-dir=run", "--json", env=ON_GPU)
    assert stale.returncode == 5 and "num_layers" in json.loads(stale.stdout)["error"]["message"]


def test_the_automatic_mode_leaves_its_program_in_the_cache(pax, tmp_path):
    cache = {
        **ON_GPU,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for run_dir, option in (("first", "--auto-pgle"), ("again", "--expect-pgle")):
        done = pax("train", *RECIPE, f"--run-dir={run_dir}", option, "--json", env=cache)
        assert done.returncode == 0, done.stderr
        assert "empty trace" not in done.stderr and "CACHE MISS" not in done.stderr


def test_a_trace_of_a_gpu_divides_its_time(pax):
    done = pax("train", *RECIPE, "--run-dir=run", "--profile-steps=20:24", "--json", env=ON_GPU)
    assert done.returncode == 0, done.stderr
    found = json.loads(pax("profile", "summarize", "run", "--json").stdout)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["shares"]["matmul"] > 0 and found["steps"] == 5
    assert {"stack/layers/feed_forward", "optimizer"} <= {one["layer"] for one in found["layers"]}
