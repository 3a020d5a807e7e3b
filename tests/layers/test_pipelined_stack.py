"""Stages against the plain stack, on one device. tests/training/test_pipeline.py has the meshes."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.block import TransformerBlock
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.pipeline import Pipeline, to_layers
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.rms_norm import RmsNorm
from paxcli.layers.stack import Stack
from tests.layers.stages import to_stages
from tests.tolerances import FLOAT32

L, B, T, D = 4, 8, 6, 16
WIDTHS = dict(num_layers=L, model_dims=D, hidden_dims=32, num_heads=4, dims_per_head=4, remat_policy="everything")


@pytest.fixture(scope="module")
def inputs():
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    segment_ids = jnp.where(jnp.arange(T) < jnp.arange(B)[:, None] % T, 1, 2)
    return x, None, segment_ids, jnp.broadcast_to(jnp.arange(T), (B, T))


@pytest.fixture(scope="module")
def params(inputs):
    return nn.meta.unbox(jax.jit(Stack(**WIDTHS).init)(jax.random.key(1), *inputs))["params"]


def _unrolled(params):
    return {f"layers_{i}": jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(L)}


def _assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), found, expected)


@pytest.mark.parametrize(("rounds", "scan", "stream_io"), [(1, True, False), (2, True, True), (2, False, False)])
def test_bubbles_leave_no_trace(rounds, scan, stream_io, inputs, params):
    """With norms that divide zero by zero, a bubble of zeros would turn every gradient into NaN."""
    block = functools.partial(TransformerBlock, norm=functools.partial(RmsNorm, epsilon=0.0))
    params = {"layers": {**params["layers"]}}
    for norm in ("attention_norm", "feed_forward_norm"):
        params["layers"][norm] = {"scale": params["layers"][norm]["scale"]}
    params = params if scan else _unrolled(params)

    def value_and_grads(stack, params):
        def loss(params, x):
            return jnp.sum(jnp.sin(stack.apply({"params": params}, x, *inputs[1:])[0]))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, inputs[0])

    expected = value_and_grads(Stack(**WIDTHS, block=block, scan=scan), params)
    pipelined = PipelinedStack(
        **WIDTHS, block=block, scan=scan, num_stages=2, num_microbatches=4, circular_repeat=rounds, stream_io=stream_io
    )
    value, (grads, by_input) = value_and_grads(pipelined, to_stages(params, 2, rounds))
    _assert_close((value, (to_layers(grads), by_input)), expected)


@pytest.mark.parametrize(("rounds", "scan"), [(1, False), (2, True)])
def test_activations_in_host_memory_change_nothing(rounds, scan, inputs, params):
    widths = {**WIDTHS, "remat_policy": "nothing"}
    params = to_stages(params if scan else _unrolled(params), 2, rounds)

    def grads(offload):
        stack = PipelinedStack(
            **widths, scan=scan, num_stages=2, num_microbatches=4, circular_repeat=rounds, offload=offload
        )

        def loss(params):
            return jnp.sum(jnp.sin(stack.apply({"params": params}, *inputs)[0]))

        traced = jax.jit(jax.grad(loss)).trace(params)
        return str(traced.jaxpr).count("<host>"), traced.lower().compile()(params)

    on_host, offloaded = grads(("layer_input", "query", "out_proj"))
    none, expected = grads(())
    assert on_host > 0 and none == 0
    _assert_close(offloaded, expected)


@pytest.mark.parametrize(("rounds", "scan"), [(1, False), (2, True)])
def test_decoding_runs_layer_by_layer(rounds, scan, inputs, params):
    params = params if scan else _unrolled(params)
    x, _, segment_ids, segment_pos = inputs
    in_order = Stack(**WIDTHS, scan=scan)
    cache = in_order.init_cache(B, T, jnp.float32)
    expected = jax.jit(in_order.apply)({"params": params}, x, cache, segment_ids, segment_pos)
    stack = PipelinedStack(**WIDTHS, scan=scan, num_stages=2, microbatch_size=3, circular_repeat=rounds)
    staged = {"params": to_stages(params, 2, rounds)}
    found = jax.jit(stack.apply)(staged, x, cache, segment_ids, segment_pos)
    _assert_close(found, expected)


def test_layers_keep_their_order():
    scanned = {"layers": {"w": np.arange(12)[:, None] * np.ones(5)}}
    circular = to_stages(scanned, num_stages=3, circular_repeat=2)["repeats"]["stages"]["layers"]["w"]
    assert circular.shape == (2, 3, 2, 5)
    for repeat, stage, k in np.ndindex(2, 3, 2):
        assert (circular[repeat, stage, k] == (repeat * 3 + stage) * 2 + k).all()
    assert to_stages(scanned, 3)["stages"]["layers"]["w"].shape == (3, 4, 5)
    unrolled = {f"layers_{i}": {"w": np.full(5, i)} for i in range(12)}
    assert to_stages(unrolled, 3, 2)["repeats"]["stages"]["layers_1"]["w"][:, :, 0].tolist() == [[1, 3, 5], [7, 9, 11]]
    for params in (scanned, unrolled):
        for rounds in (1, 2):
            jax.tree.map(np.testing.assert_array_equal, to_layers(to_stages(params, 3, rounds)), params)


@pytest.mark.parametrize(
    ("rounds", "scan", "lead"),
    [(1, True, {"stage": 2, "layers": 2}), (1, False, {"stage": 2}), (2, False, {"layers": 2, "stage": 2})],
)
def test_each_layer_starts_different_and_names_its_axes(rounds, scan, lead, inputs):
    stack = PipelinedStack(**WIDTHS, scan=scan, num_stages=2, num_microbatches=1, circular_repeat=rounds)
    # A single row, as a train state is made from: it does not divide into microbatches.
    boxed = jax.jit(stack.init)(jax.random.key(1), *(x if x is None else x[:1] for x in inputs))["params"]
    stages = boxed["repeats"]["stages"] if rounds > 1 else boxed["stages"]
    box = stages["layers" if scan else "layers_0"]["feed_forward"]["w_in"]
    assert box.names == (*lead, "embed", "mlp")
    assert box.value.shape == (*lead.values(), D, 32)
    layers = to_layers(nn.meta.unbox(boxed))
    layers = _unrolled(layers) if scan else layers
    assert len({float(layer["feed_forward"]["w_in"][0, 0]) for layer in layers.values()}) == L
    spread = [float(jnp.std(layer["feed_forward"]["w_in"])) for layer in layers.values()]
    np.testing.assert_allclose(spread, (6 / (D + 32) / 3) ** 0.5, rtol=0.1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_stages=3), r"num_layers=4 does not divide into num_stages=3 \(4 / 3 = 1.33333\)"),
        (dict(num_stages=2, circular_repeat=4), r"num_stages=2 × circular_repeat=4 = 8 \(4 / 8 = 0.5\)"),
        (dict(num_stages=2), "Neither `num_microbatches` nor `microbatch_size` is set"),
        (dict(num_stages=2, num_microbatches=2, microbatch_size=2), r"Both .num_microbatches. \(2\) and"),
        (dict(num_stages=2, num_microbatches=3), r"8 rows does not divide by num_microbatches=3 \(8 / 3 = 2.66667\)"),
        (dict(num_stages=2, microbatch_size=5), r"8 rows does not divide by microbatch_size=5 \(8 / 5 = 1.6\)"),
        (dict(num_stages=2, num_microbatches=1, circular_repeat=2), "8 rows make 1, and num_stages=2"),
        (dict(num_stages=4, microbatch_size=4, stream_io=True), r"8 rows make 2, .*\(2 / 4 = 0.5\)"),
    ],
)
def test_arithmetic_that_does_not_work_out(fields, message):
    pipeline = Pipeline(**fields)
    with pytest.raises(ConfigError, match=message):
        pipeline.layers_per_group(L)
        pipeline.count_microbatches(B)


def test_bubbles_do_not_move_the_balance_bias(inputs):
    """With equal rows, each microbatch moves it as all rows do."""
    experts = functools.partial(
        MoeFeedForward, num_experts=5, num_experts_per_token=2, scoring="sigmoid", balance_bias=True
    )
    widths = {**WIDTHS, "num_layers": 2, "block": functools.partial(TransformerBlock, feed_forward=experts)}
    plain, pipelined = Stack(**widths), PipelinedStack(**widths, num_stages=2, num_microbatches=4)
    x, *facts = jax.tree.map(lambda array: jnp.broadcast_to(array[:1], array.shape), inputs)
    params = nn.meta.unbox(jax.jit(plain.init)(jax.random.key(1), x, *facts))["params"]

    def gradient(stack, params):
        def loss(params):
            return jnp.sum(jnp.sin(stack.apply({"params": params}, x, *facts)[0]))

        return jax.jit(jax.grad(loss))(params)

    expected = gradient(plain, params)["layers"]["feed_forward"]["balance_bias"]
    found = to_layers(gradient(pipelined, to_stages(params, 2)))["layers"]["feed_forward"]["balance_bias"]
    assert np.any(expected)
    np.testing.assert_allclose(found, 4 * expected)


@pytest.mark.parametrize(("rounds", "scan"), [(1, True), (2, False)])
def test_the_balance_of_experts_is_that_of_the_plain_stack(rounds, scan, inputs):
    """As a metric, one value for each layer, and in the gradients; bubbles do not count."""
    block = functools.partial(TransformerBlock, feed_forward=functools.partial(MoeFeedForward, num_experts=4))
    plain = Stack(**WIDTHS, block=block, scan=scan)
    params = nn.meta.unbox(jax.jit(plain.init)(jax.random.key(1), *inputs))["params"]

    def value_and_grads(stack, params):
        def loss(params):
            (y, _), reported = stack.apply({"params": params}, *inputs, mutable=["metrics"])
            values = jnp.concatenate([value.ravel() for value in jax.tree.leaves(reported)])
            return jnp.sum(jnp.sin(y)) + jnp.sum(values), values

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    pipelined = PipelinedStack(
        **WIDTHS, block=block, scan=scan, num_stages=2, num_microbatches=4, circular_repeat=rounds
    )
    (loss, values), grads = value_and_grads(pipelined, to_stages(params, 2, rounds))
    (expected_loss, expected), expected_grads = value_and_grads(plain, params)
    assert values.shape == expected.shape == (L,)
    _assert_close((loss, jnp.mean(values), to_layers(grads)), (expected_loss, jnp.mean(expected), expected_grads))
