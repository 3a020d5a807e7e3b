"""JAX's automatic mode around a step: number of compilations and profiles, and what the cache has afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring
from jax._src import profiler
from jax.experimental.compilation_cache import compilation_cache

from paxcli.config.resolve import resolve
from paxcli.errors import MissingError
from paxcli.profiling.auto import AutoPgle
from paxcli.profiling.costs import encode
from paxcli.profiling.instruments import Instrumentation
from paxcli.training.run_dir import RunDir

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


@pytest.fixture(autouse=True)
def settings():
    names = ("jax_pgle_profiling_runs", "jax_pgle_aggregation_percentile")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    assert not jax.config.jax_enable_pgle and not jax.config.jax_compilation_cache_expect_pgle


@contextlib.contextmanager
def counted():
    """Counts compilations, and cache hits."""
    found = {_COMPILED: 0, _FROM_CACHE: 0}

    def count(name: str, *_: object, **__: object) -> None:
        if name in found:
            found[name] += 1

    monitoring.register_event_duration_secs_listener(count)
    monitoring.register_event_listener(count)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(count)
        monitoring.unregister_event_listener(count)


def step_of(scale: float) -> jax.stages.Wrapped:
    return jax.jit(lambda state, batch: (state + scale * batch @ batch, {"loss": jnp.sum(batch)}), donate_argnums=0)


def compilations(step: Callable, calls: int) -> list[int]:
    state, batch = jnp.zeros((64, 64)), jnp.ones((64, 64))
    counts = []
    for _ in range(calls):
        with counted() as found:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        counts.append(found[_COMPILED])
    return counts


@pytest.fixture
def cache(tmp_path):
    """An empty compilation cache that stores programs of any compile time."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    for directory, seconds in ((str(tmp_path), 0), before):
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        if directory == str(tmp_path):
            yield


def test_the_first_calls_are_profiled_and_the_step_is_recompiled(monkeypatch, cache):
    profiled = []
    monkeypatch.setattr(
        profiler._profiler, "get_fdo_profile", lambda xspace: profiled.append(xspace) or encode({"dot.1": 1.0})
    )
    step = AutoPgle(runs=3).around(step_of(1.5))
    assert compilations(step, 6) == [1, 0, 0, 1, 0, 0]
    assert len(profiled) == 3


def test_other_functions_are_not_profiled(monkeypatch):
    profiled = []
    monkeypatch.setattr(profiler._profiler, "get_fdo_profile", lambda xspace: profiled.append(xspace) or b"")
    AutoPgle(runs=2)
    assert compilations(step_of(2.5), 4) == [1, 0, 0, 0] and not profiled


def test_a_restarted_run_takes_the_recompiled_program_from_the_cache(monkeypatch, cache):
    monkeypatch.setattr(profiler._profiler, "get_fdo_profile", lambda _: encode({"dot.1": 1.0}))
    first = AutoPgle(runs=1).around(step_of(3.5))
    assert compilations(first, 4) == [1, 1, 0, 0]
    monkeypatch.setattr(profiler._profiler, "get_fdo_profile", lambda _: pytest.fail("profiled again"))
    for again in (AutoPgle(runs=1), AutoPgle(runs=None)):
        jax.clear_caches()
        with counted() as found:
            assert compilations(again.around(step_of(3.5)), 3)[1:] == [0, 0]
        assert found[_FROM_CACHE] >= 1


def test_a_missing_expected_program_is_a_warning(cache):
    step = AutoPgle(runs=None).around(step_of(4.5))
    with pytest.warns(UserWarning, match="EXPECT_PGLE is set"):
        assert compilations(step, 3)[1:] == [0, 0]


def test_a_cpu_gives_no_profile(tmp_path):
    config = resolve("tiny").config
    for asked in (Instrumentation(auto_pgle=True), Instrumentation(expect_pgle=True)):
        with pytest.raises(MissingError, match="gives no profile"):
            asked.instrument(config, RunDir(tmp_path))
