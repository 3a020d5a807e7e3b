"""Adafactor against optax's where they coincide, and against the paper's algorithm in numpy elsewhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.mesh.weights import Weight
from paxcli.optim.adafactor import ShardedAdafactor
from paxcli.optim.curves import LinearSchedule
from paxcli.training.learner import Learner
from tests.tolerances import BFLOAT16


def _params() -> dict:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "layers": {"query": jax.random.normal(keys[0], (2, 6, 4, 5)), "b_in": jax.random.normal(keys[1], (2, 4))},
        "table": jax.random.normal(keys[2], (7, 6)),
        "scale": 1e-4 * jax.random.normal(keys[3], (4,)),
    }


WEIGHTS = {
    "layers": {
        "query": Weight(("embed", "heads", "head_dim"), (0,), (1, 2), num_stacked=1),
        "b_in": Weight(("mlp",), num_stacked=1),
    },
    "table": Weight(("vocab", "embed"), (0,), (1,), is_table=True),
    "scale": Weight(("norm",)),
}


def _grads(number: int) -> dict:
    return jax.tree.map(lambda p: jnp.sin(p * (number + 2)) * 0.1**number, _params())


def _ours(optimizer: ShardedAdafactor, steps: int = 4) -> tuple[dict, dict]:
    """Parameters after some steps at a changing learning rate, and the state."""
    learner = Learner(
        optimizer=optimizer,
        learning_rate=0.1,
        schedule=LinearSchedule((0, 0.0), (2, 1.0)),
        clip_gradient_norm_to_value=None,
    )
    params = _params()
    state = learner.init(params, WEIGHTS)
    update = jax.jit(functools.partial(learner.update, weights=WEIGHTS))
    for number in range(steps):
        params, state, _ = update(_grads(number), state, params, jnp.int32(number))
    return params, state


def _unscanned(tree: dict) -> dict:
    """Each layer as a tensor of its own: optax knows no scanned layers."""
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(2)]
    return {"table": tree["table"], "scale": tree["scale"], "0": layers[0], "1": layers[1]}


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("relative", [True, False])
def test_equals_optax(beta1, relative):
    ours, _ = _ours(
        ShardedAdafactor(
            decay_method="pow",
            decay_pow=0.8,
            beta1=beta1,
            sort_factored_second_moment_dims=True,
            min_dim_size_to_factor=5,
            multiply_by_parameter_scale=relative,
        )
    )
    theirs = optax.adafactor(
        lambda count: 0.1 * jnp.minimum(count / 2, 1.0),
        min_dim_size_to_factor=5,
        decay_rate=0.8,
        multiply_by_parameter_scale=relative,
        clipping_threshold=1.0,
        momentum=beta1 or None,
    )
    params = _unscanned(_params())
    state, update = theirs.init(params), jax.jit(theirs.update)
    for number in range(4):
        updates, state = update(_unscanned(_grads(number)), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), _unscanned(ours), params)


@pytest.mark.parametrize("decay_biases", [True, False])
def test_equals_the_algorithm(decay_biases):
    """Pax's own way: the last two dimensions, Adam's decay, momentum of scaled updates, decay times learning rate."""
    ours, _ = _ours(
        ShardedAdafactor(
            decay_adam=0.9, beta1=0.8, clipping_threshold=0.5, weight_decay=0.3, decay_norms_and_biases=decay_biases
        )
    )
    grads = [_unscanned(_grads(number)) for number in range(4)]
    grads = [jax.tree_util.tree_leaves_with_path(tree) for tree in grads]
    expected = []
    for index, (path, start) in enumerate(jax.tree_util.tree_leaves_with_path(_unscanned(_params()))):
        decays = decay_biases or path[-1].key in ("query", "table")
        expected.append(_alone(start, [np.asarray(tree[index][1], np.float64) for tree in grads], 0.3 * decays))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(_unscanned(ours)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=str(path))


def _alone(param: jax.Array, grads: list[np.ndarray], weight_decay: float) -> np.ndarray:
    """Four updates of one tensor with plain averages: an unbiased moving average is a weighted mean of the past."""
    param, momentum = np.asarray(param, np.float64), 0.0
    for number, grad in enumerate(grads):
        weights = 0.9 ** np.arange(number, -1, -1)
        second = sum(w * g**2 for w, g in zip(weights, grads, strict=False)) / sum(weights)
        if grad.ndim > 1:
            rows, columns = second.mean(-1, keepdims=True), second.mean(-2, keepdims=True)
            second = rows * columns / second.mean((-2, -1), keepdims=True)
        update = grad / np.sqrt(second)
        update /= max(1.0, np.sqrt(np.mean(update**2)) / 0.5)
        learning_rate = 0.1 * min(number / 2, 1.0)
        momentum = 0.8 * momentum + 0.2 * learning_rate * update
        param = param - momentum - learning_rate * weight_decay * param
    return param


def test_keeps_what_it_needs():
    _, state = _ours(ShardedAdafactor(beta1=0.0))
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    assert shapes == {
        "count": (),
        "row/layers/query": (2, 6, 4),
        "row/table": (6,),
        "column/layers/query": (2, 6, 5),
        "column/table": (7,),
        "full/layers/b_in": (2, 4),
        "full/scale": (4,),
    }


PRAXIS = {"combined_qkv": (3, 6, 2, 4), "post": (6, 2, 4), "ffn_layer2": (8, 6), "bias": (8,), "softmax": (6, 9)}
_HEADS = ("embed", "heads", "head_dim")
_ATTENTION = {name: Weight(_HEADS, (0,), (1, 2), group="qkv", num_stacked=1) for name in ("query", "key", "value")} | {
    "post": Weight(("heads", "head_dim", "embed"), (0, 1), (2,), num_stacked=1)
}
PRAXIS_WEIGHTS = {
    "attention": _ATTENTION,
    "w_out": Weight(("embed", "mlp"), (1,), (0,), num_stacked=1),
    "b_in": Weight(("mlp",), num_stacked=1),
    "table": Weight(("vocab", "embed"), (0,), (1,), is_table=True),
}


def _ours_of(layers: list[dict]) -> dict:
    """Two layers of praxis's variables, and one output projection, as pax stores them."""
    query, key, value = (np.stack([layer["combined_qkv"][index] for layer in layers]) for index in range(3))
    post = np.stack([layer["post"].transpose(1, 2, 0) for layer in layers])
    tree = {
        "attention": {"query": query, "key": key, "value": value, "post": post},
        "w_out": np.stack([layer["ffn_layer2"].T for layer in layers]),
        "b_in": np.stack([layer["bias"] for layer in layers]),
        "table": layers[0]["softmax"].T,
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def _praxis(grads: list[np.ndarray], param: np.ndarray, momentum_dtype: str) -> np.ndarray:
    """Updates of one variable of praxis, in numpy: last two dimensions factored, momentum by the first dimension."""
    param, stored, scale = param.astype(np.float32), np.zeros_like(param), np.ones(param.shape[1:])
    second = [np.float64(0)] * 2
    for number, grad in enumerate(grads):
        step = number + 1
        decay = 0.99 * (1 - 0.99**number) / (1 - 0.99**step)
        means = (grad**2).mean(-1), (grad**2).mean(-2) if grad.ndim > 1 else None
        if grad.ndim > 1:
            second = [decay * old + (1 - decay) * new for old, new in zip(second, means, strict=True)]
            row, column = second
            update = grad / np.sqrt(row / row.mean(-1, keepdims=True))[..., None] / np.sqrt(column)[..., None, :]
        else:
            second[0] = decay * second[0] + (1 - decay) * grad**2
            update = grad / np.sqrt(second[0])
        update /= max(1.0, np.sqrt((update**2).mean()) / 0.7)
        momentum = 0.9 * stored * scale + 0.1 * 0.05 * update
        stored, scale = momentum, np.ones(param.shape[1:])
        if momentum_dtype == "int8":
            scale = np.abs(momentum).max(0) / 127
            stored = np.round(momentum / np.where(scale > 0, scale, 1.0))
        param = param - momentum - 0.05 * 0.01 * param
    return param


@pytest.mark.parametrize("momentum_dtype", ["float32", "int8"])
def test_statistics_are_of_the_variables_of_praxis(momentum_dtype):
    draw = np.random.default_rng(0)
    start = [{name: draw.normal(size=shape) for name, shape in PRAXIS.items()} for _ in range(2)]
    steps = [
        [{name: draw.normal(size=shape) * draw.uniform(0.1, 9) for name, shape in PRAXIS.items()} for _ in range(2)]
        for _ in range(14)
    ]
    optimizer = ShardedAdafactor(clipping_threshold=0.7, weight_decay=0.01, momentum_dtype=momentum_dtype)
    learner = Learner(optimizer=optimizer, learning_rate=0.05, clip_gradient_norm_to_value=None)
    params = _ours_of(start)
    state = learner.init(params, PRAXIS_WEIGHTS)
    update = jax.jit(functools.partial(learner.update, weights=PRAXIS_WEIGHTS))
    for number, grads in enumerate(steps):
        params, state, _ = update(_ours_of(grads), state, params, jnp.int32(number))
    expected = [
        {name: _praxis([step[layer][name] for step in steps], start[layer][name], momentum_dtype) for name in PRAXIS}
        for layer in range(2)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), params, _ours_of(expected))


def test_momentum_in_int8_is_small():
    params = _ours_of([{name: np.ones(shape) for name, shape in PRAXIS.items()}] * 2)
    state = ShardedAdafactor(momentum_dtype="int8").with_learning_rate(PRAXIS_WEIGHTS).init(params)
    momentum = jax.tree.map(lambda x: (x.shape, x.dtype.name), state.momentum)
    assert momentum == jax.tree.map(lambda x: (x.shape, "int8"), params)
    scales = jax.tree_util.tree_leaves_with_path(state.momentum_scale)
    assert {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in scales} == {
        "attention/key": (2, 6, 2, 4),  # one scale for query, key and value
        "attention/post": (2, 2, 4),
        "b_in": (2,),
        "table": (9,),
        "w_out": (2, 6),
    }


def test_momentum_in_bfloat16_is_close():
    (rounded, state), (full, _) = (_ours(ShardedAdafactor(momentum_dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.momentum)} == {"bfloat16"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **BFLOAT16), rounded, full)
