from __future__ import annotations

import functools
import re
import typing

import flax.linen as nn
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers import remat
from paxcli.layers.block import TransformerBlock
from paxcli.layers.patterned_stack import PatternedStack
from paxcli.layers.remat import RematPolicy, saveable
from paxcli.layers.stack import Stack
from tests.tolerances import FLOAT32

WIDTHS = dict(num_layers=3, model_dims=16, hidden_dims=32, num_heads=4, dims_per_head=4)


def _unboxed(tree):
    return jax.tree.map(lambda box: box.value, tree, is_leaf=lambda leaf: hasattr(leaf, "names"))


@pytest.fixture(scope="module")
def inputs():
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    return x, None, jnp.ones((2, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (2, 6))


@pytest.fixture(scope="module")
def scanned_params(inputs):
    return _unboxed(jax.jit(Stack(**WIDTHS).init)(jax.random.key(1), *inputs))["params"]


def _value_and_gradients(stack: Stack, params, inputs):
    def loss(params, x):
        y, _ = stack.apply({"params": params}, x, *inputs[1:])
        return jnp.sum(jnp.sin(y))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, inputs[0])


def _unrolled(params):
    return {f"layers_{i}": jax.tree.map(lambda p, i=i: p[i], params["layers"]) for i in range(3)}


_LONGER = {"dots", "out_proj", "context_and_out_proj", "qkv_out_proj", "dots_except_logits_and_feed_forward_in"}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=pytest.mark.slow if policy in _LONGER else ())
        for policy in typing.get_args(RematPolicy)[1:]
    ],
)
def test_remat_policies_change_nothing(policy, inputs, scanned_params):
    expected = _value_and_gradients(Stack(**WIDTHS, remat_policy="everything"), scanned_params, inputs)
    scanned = _value_and_gradients(Stack(**WIDTHS, remat_policy=policy), scanned_params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), scanned, expected)
    value, (grads, by_input) = _value_and_gradients(
        Stack(**WIDTHS, remat_policy=policy, scan=False), _unrolled(scanned_params), inputs
    )
    np.testing.assert_allclose(value, expected[0], **FLOAT32)
    np.testing.assert_allclose(by_input, expected[1][1], **FLOAT32)
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *(grads[f"layers_{i}"] for i in range(3)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), stacked, expected[1][0]["layers"])


def test_named_activations_wait_on_the_host_beside_what_the_policy_keeps(inputs, scanned_params):
    expected = _value_and_gradients(Stack(**WIDTHS, remat_policy="everything"), scanned_params, inputs)
    stack = Stack(**WIDTHS, remat_policy="out_proj", offload=("layer_input", "query", "feed_forward_in"))
    found = _value_and_gradients(stack, scanned_params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), found, expected)
    jaxpr = str(jax.make_jaxpr(lambda params: _value_and_gradients(stack, params, inputs))(scanned_params))
    moved = re.findall(r"\w+:f32<host>\[([\d,]+)\] = device_put", jaxpr)
    assert len(set(moved)) == 3, moved  # one shape for each name


def test_named_activations_are_saved_beside_those_of_the_policy(inputs, scanned_params, capsys):
    def saved(**policy) -> list[str]:
        stack = Stack(**WIDTHS, scan=False, **policy)
        jax.ad_checkpoint.print_saved_residuals(
            lambda params: jnp.sum(stack.apply({"params": params}, *inputs)[0]), _unrolled(scanned_params)
        )
        return sorted(re.findall(r"named '(\w+)'", capsys.readouterr().out))

    assert saved(remat_policy="nothing") == []
    both = dict(remat_policy="out_proj", save=("query", "feed_forward_in"))
    assert saved(**both) == sorted(3 * ["out_proj", "query", "feed_forward_in"])
    expected = _value_and_gradients(Stack(**WIDTHS, remat_policy="everything"), scanned_params, inputs)
    found = _value_and_gradients(Stack(**WIDTHS, **both), scanned_params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), found, expected)


def test_a_device_without_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(remat, "memory_kinds", lambda: {"device"})
    with pytest.raises(ConfigError, match="remat_policy=dots_with_no_batch_dims_offloaded"):
        saveable("dots_with_no_batch_dims_offloaded")
    with pytest.raises(ConfigError, match=r"offload=\['query'\]"):
        saveable("nothing", ["query"])


def test_offloading_besides_everything_is_refused():
    with pytest.raises(ConfigError, match="leaves nothing to offload"):
        saveable("everything", ["query"])
    with pytest.raises(ConfigError, match="leaves nothing to offload or save"):
        saveable("everything", (), ["query"])
    with pytest.raises(ConfigError, match="`save` and `offload` both name query"):
        saveable("nothing", ["query"], ["key", "query"])


def test_remat_saves_memory(inputs, scanned_params):
    def temporaries(policy: str) -> int:
        stack = Stack(**WIDTHS, remat_policy=policy)

        def loss(params):
            return jnp.sum(stack.apply({"params": params}, *inputs)[0])

        return jax.jit(jax.grad(loss)).lower(scanned_params).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("nothing") < temporaries("everything")


def _in_turns(**fields) -> PatternedStack:
    """Four layers in two groups."""
    block = Stack(**WIDTHS).block
    return PatternedStack(**{**WIDTHS, "num_layers": 4}, turns=(block, block), **fields)


@pytest.mark.parametrize(("num_first", "left"), [(4, 0), (9, 0), (1, 3)])
def test_first_layers_have_to_leave_a_multiple_of_the_turns(inputs, num_first, left):
    stack = _in_turns(first=Stack(**WIDTHS).block, num_first=num_first)
    with pytest.raises(ConfigError, match=rf"num_layers=4 \(num_first={num_first}\) leaves {left} layers for `turns`"):
        stack.init(jax.random.key(0), *inputs)


@pytest.mark.parametrize(
    ("in_turns", "unroll", "prevented"),
    [(False, 1, False), (False, 2, False), (False, 3, True), (False, 64, True), (True, 1, False), (True, 2, True)],
)
def test_xla_may_not_undo_the_remat_of_a_scan_of_one_iteration(inputs, in_turns, unroll, prevented):
    """XLA inlines such a scan; without barriers, CSE would then reuse activations of the forward pass."""
    fields = dict(unroll=unroll, remat_policy="nothing")
    stack = _in_turns(**fields) if in_turns else Stack(**WIDTHS, **fields)
    params = _unboxed(jax.eval_shape(stack.init, jax.random.key(1), *inputs))["params"]
    jaxpr = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(stack.apply({"params": params}, *inputs)[0])))
    assert (f"prevent_cse={prevented}") in str(jaxpr(params))


class _Dropped(nn.Module):
    """A feed-forward layer that knows nothing of pax."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


@pytest.mark.parametrize("scan", [True, False])
def test_own_layers_have_random_keys_in_training(scan, inputs):
    stack = Stack(
        **WIDTHS, scan=scan, block=functools.partial(TransformerBlock, feed_forward=functools.partial(_Dropped))
    )
    variables = _unboxed(jax.jit(stack.init)(jax.random.key(1), *inputs))
    apply = jax.jit(stack.apply)
    evaluated = [apply(variables, *inputs)[0] for _ in range(2)]
    trained = [apply(variables, *inputs, rngs={"dropout": jax.random.key(seed)})[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(*evaluated)
    np.testing.assert_array_equal(*trained[:2])
    assert not np.allclose(trained[0], evaluated[0]) and not np.allclose(trained[0], trained[2])


def test_each_layer_starts_different(scanned_params):
    weights = scanned_params["layers"]["feed_forward"]["w_in"]
    assert weights.shape == (3, 16, 32)
    assert not np.allclose(weights[0], weights[1])


def test_scanned_stack_equals_blocks_one_by_one(inputs, scanned_params):
    block = TransformerBlock(**{name: size for name, size in WIDTHS.items() if name != "num_layers"})
    x, apply = inputs[0], jax.jit(block.apply)
    for i in range(3):
        x, _ = apply({"params": jax.tree.map(lambda p, i=i: p[i], scanned_params["layers"])}, x, *inputs[1:])
    y, _ = jax.jit(Stack(**WIDTHS, unroll=2).apply)({"params": scanned_params}, *inputs)
    np.testing.assert_allclose(y, x, **FLOAT32)
