from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.metrics.meter import Meter, peak_memory_bytes


def _meter(num_train_steps=100, interval=10, flops=None, peak=None, tokens=1000):
    return Meter(
        flops_per_step=flops,
        tokens_per_step=tokens,
        num_train_steps=num_train_steps,
        peak_flops_total=peak,
        summary_interval_steps=interval,
    )


def _loss(value=1.0):
    return {"loss": jnp.float32(value)}


def _run(meter, steps, seconds=0.0, input_wait_seconds=0.0):
    records = []
    for step in steps:
        time.sleep(seconds)
        records += meter.record(step, _loss(step), input_wait_seconds)
    return records + meter.flush()


def test_the_first_every_nth_and_the_last_step_are_logged():
    records = _run(_meter(num_train_steps=25), range(1, 26))
    assert [record.step for record in records] == [1, 10, 20, 25]
    assert [record.values["loss"] for record in records] == [1.0, 10.0, 20.0, 25.0]


def test_a_resumed_run_logs_the_steps_that_it_would_have_logged():
    assert [record.step for record in _run(_meter(num_train_steps=25), range(14, 26))] == [20, 25]


def test_values_equal_those_on_the_device_bit_for_bit():
    metrics = jax.jit(lambda x: {"loss": jnp.log(x) / 3, "skipped_steps": jnp.int32(2), "half": jnp.bfloat16(0.1)})(7.3)
    meter = _meter()
    meter.record(1, metrics, 0.0)
    values = meter.flush()[0].values
    assert isinstance(values["loss"], float)
    assert np.float32(values["loss"]).tobytes() == np.asarray(metrics["loss"]).tobytes()
    assert values["loss"] == float(np.float32(metrics["loss"]))
    assert values["skipped_steps"] == 2 and isinstance(values["skipped_steps"], int)
    assert values["half"] == float(metrics["half"])


def test_values_that_are_not_finite_are_recorded():
    meter = _meter()
    meter.record(1, _loss(float("nan")), 0.0)
    assert np.isnan(meter.flush()[0].values["loss"])


def test_the_host_runs_two_steps_ahead_and_no_more():
    @jax.jit
    def slow_step(x):
        return jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ x), x)

    x = slow_step(jnp.ones((300, 300)) / 300).block_until_ready()
    losses = []
    meter = _meter(interval=1)
    records = []
    for step in range(1, 6):
        x = slow_step(x)
        losses.append(x[0, 0])
        records += meter.record(step, {"loss": losses[-1]}, 0.0)
        assert [record.step for record in records] == list(range(1, step - 1))
        assert all(loss.is_ready() for loss in losses[:-2])
    assert not losses[-1].is_ready()
    assert [record.step for record in meter.flush()] == [4, 5]
    assert meter.flush() == []


def test_rates_cover_the_window():
    meter = _meter(flops=2e9, peak=1e12)
    begin = time.perf_counter()
    first, second = _run(meter, range(1, 11), seconds=0.02, input_wait_seconds=0.005)
    elapsed = time.perf_counter() - begin
    values = second.values
    assert 0.019 <= values["step_seconds"] <= elapsed / 9
    assert values["tokens_per_second"] == pytest.approx(1000 / values["step_seconds"])
    assert values["mfu"] == pytest.approx(2e9 / values["step_seconds"] / 1e12)
    assert values["input_wait_seconds"] == pytest.approx(0.005)
    assert first.values["input_wait_seconds"] == pytest.approx(0.005)


def test_unknown_values_are_none():
    values = _run(_meter(tokens=None, peak=1e12), [1])[0].values
    assert values["mfu"] is None
    assert values["tokens_per_second"] is None
    assert _run(_meter(flops=1e9, peak=None), [1])[0].values["mfu"] is None


def test_pauses_do_not_count():
    meter = _meter()
    _run(meter, range(1, 6), seconds=0.01)
    with meter.pause():
        time.sleep(0.6)
    record = _run(meter, range(6, 11), seconds=0.01)[0]
    assert record.step == 10
    assert 0.009 <= record.values["step_seconds"] < 0.05
    assert record.values["seconds_left"] >= 90 * 0.6 / 9  # but the run does take that time


def test_a_pause_keeps_the_records_of_the_steps_that_it_waited_for():
    meter = _meter()
    assert meter.record(1, _loss(), 0.0) == []
    with meter.pause():
        pass
    assert [record.step for record in meter.record(2, _loss(), 0.0)] == [1]


def test_compilation_is_only_in_the_rate_of_the_first_step():
    meter = _meter(num_train_steps=130)
    time.sleep(0.5)
    fresh = _run(_meter(num_train_steps=130), range(1, 11), seconds=0.01)
    resumed = _run(meter, range(101, 111), seconds=0.01)
    assert fresh[0].values["seconds_left"] is None
    for record in (fresh[1], resumed[0]):
        assert record.values["step_seconds"] < 0.04
        remaining = 130 - record.step
        assert 0.009 * remaining <= record.values["seconds_left"] < 0.04 * remaining


def test_peak_memory_covers_what_was_in_use():
    array = np.ones(8_000_000)
    assert array.nbytes < peak_memory_bytes() < 1 << 40
    assert _run(_meter(), [1])[0].values["peak_memory_bytes"] <= peak_memory_bytes()


def test_the_devices_are_idle_from_the_last_step_on():
    meter = _meter()
    begin = time.perf_counter()
    time.sleep(0.02)
    assert meter.idle_seconds(begin) >= 0.02  # no step yet
    _run(meter, [1])
    begin = time.perf_counter()
    time.sleep(0.05)
    assert 0.04 <= meter.idle_seconds(begin) <= time.perf_counter() - begin
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ x), x))
    x = slow(jnp.ones((300, 300))).block_until_ready()
    meter.record(2, {"loss": slow(x)[0, 0]}, 0.0)
    assert meter.idle_seconds(begin) == 0.0  # the step is in flight
    meter.flush()
