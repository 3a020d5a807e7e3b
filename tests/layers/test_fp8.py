"""Products in FP8 against numpy on ml_dtypes' 8-bit numbers, and stacks of such layers against each other."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.block import TransformerBlock
from paxcli.layers.fp8 import FP8_STATE, Fp8Product, accumulating
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.pipeline import to_layers
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.stack import Stack
from tests.layers.stages import to_stages
from tests.tolerances import FLOAT32

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def _rounded(x, largest_before: float, kind, kind_max: float):
    """`x` in 8 bits, by the scale that follows from the largest value of the step before."""
    scale = np.float32(largest_before / kind_max)
    return np.clip(x / scale, -kind_max, kind_max).astype(kind).astype(np.float32) * scale


def test_a_step_is_scaled_by_the_one_before():
    keys = jax.random.split(jax.random.key(0), 4)
    before, x = 0.01 * jax.random.normal(keys[0], (3, 4, 16)), 0.02 * jax.random.normal(keys[1], (3, 4, 16))
    w, weights = jax.random.normal(keys[2], (16, 2, 8)), 1e-6 * jax.random.normal(keys[3], (3, 4, 2, 8))
    layer = Fp8Product()

    def loss(x, w, state):
        return jnp.sum(weights * layer.apply({FP8_STATE: accumulating(state)}, "btd,dnh->btnh", x, w))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    state = layer.init(jax.random.key(0), "btd,dnh->btnh", before, w)[FP8_STATE]
    _, (_, _, state) = step(before, w, state)
    assert float(jnp.max(state["kernel_amax_history"])) == float(jnp.max(jnp.abs(w)))
    value, (by_x, by_w, state) = step(x, w, state)

    x8 = _rounded(np.asarray(x), float(jnp.max(jnp.abs(before))), ml_dtypes.float8_e4m3fn, E4M3_MAX)
    w8 = _rounded(np.asarray(w), float(jnp.max(jnp.abs(w))), ml_dtypes.float8_e4m3fn, E4M3_MAX)
    g8 = _rounded(np.asarray(weights), float(jnp.max(jnp.abs(weights))), ml_dtypes.float8_e5m2, E5M2_MAX)
    np.testing.assert_allclose(value, np.sum(np.einsum("btd,dnh->btnh", x8, w8) * np.asarray(weights)), rtol=1e-5)
    np.testing.assert_allclose(by_x, np.einsum("btnh,dnh->btd", g8, w8), rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(by_w, np.einsum("btd,btnh->dnh", x8, g8), rtol=1e-5, atol=1e-10)
    assert sorted(np.asarray(state["input_amax_history"])[[0, -1]]) == [jnp.max(jnp.abs(before)), jnp.max(jnp.abs(x))]


L, B, T, D = 4, 8, 6, 16
WIDTHS = dict(num_layers=L, model_dims=D, hidden_dims=32, num_heads=4, dims_per_head=4)


@pytest.mark.parametrize(
    ("rounds", "scan", "remat_policy"),
    [
        pytest.param(1, True, "nothing", marks=pytest.mark.slow),
        pytest.param(1, False, "everything", marks=pytest.mark.slow),
        pytest.param(2, True, "everything", marks=pytest.mark.slow),
    ],
)
def test_pipelines_learn_the_scales_of_the_plain_stack(rounds, scan, remat_policy):
    """Its microbatches count together, and its bubbles do not count."""
    ids, position = jnp.ones((B, T), jnp.int32), jnp.broadcast_to(jnp.arange(T), (B, T))
    x = jax.random.normal(jax.random.key(0), (B, T, D))
    block = functools.partial(TransformerBlock, precision="fp8")
    plain = Stack(**WIDTHS, block=block, scan=scan, remat_policy="everything")
    variables = nn.meta.unbox(jax.jit(plain.init)(jax.random.key(1), x, None, ids, position))
    # Off their initial values, so that scales and histories matter.
    random = np.random.RandomState(2)
    state = jax.tree.map(lambda s: s + 0.1 * random.rand(*s.shape).astype(np.float32), variables[FP8_STATE])

    def step(stack, params, state):
        def loss(params, state):
            y, _ = stack.apply({"params": params, FP8_STATE: accumulating(state)}, x, None, ids, position)
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, state)

    expected = step(plain, variables["params"], state)
    pipelined = PipelinedStack(
        **WIDTHS,
        block=block,
        scan=scan,
        num_stages=2,
        num_microbatches=4,
        circular_repeat=rounds,
        remat_policy=remat_policy,
    )
    made = jax.eval_shape(pipelined.init, jax.random.key(1), x[:1], None, ids[:1], position[:1])
    assert jax.tree.map(jnp.shape, made[FP8_STATE]) == jax.tree.map(jnp.shape, to_stages(state, 2, rounds))
    value, found = step(pipelined, *(to_stages(tree, 2, rounds) for tree in (variables["params"], state)))
    found = (value, tuple(map(to_layers, found)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), found, expected)


def test_experts_do_not_compute_in_fp8():
    block = functools.partial(TransformerBlock, precision="fp8", feed_forward=functools.partial(MoeFeedForward))
    ids = jnp.ones((B, T), jnp.int32)
    with pytest.raises(ConfigError, match="MoeFeedForward does not compute in fp8"):
        jax.eval_shape(Stack(**WIDTHS, block=block).init, jax.random.key(1), jnp.zeros((B, T, D)), None, ids, ids)
