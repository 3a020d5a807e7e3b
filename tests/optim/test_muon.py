"""Muon against optax on matrices, and against Newton-Schulz in numpy on weights of more dimensions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxcli.mesh.weights import Weight
from paxcli.optim.muon import Muon
from paxcli.training.learner import Learner

MATRIX = Weight(("embed", "mlp"), (0,), (1,))
HEADS = Weight(("embed", "heads", "head_dim"), (0,), (1, 2))
WEIGHTS = {
    "w_in": MATRIX,
    "query": HEADS,
    "post": Weight(("heads", "head_dim", "embed"), (0, 1), (2,)),
    "layers": {"query": Weight(HEADS.axes, HEADS.contracts, HEADS.produces, num_stacked=1)},
    "experts": Weight(("expert", "embed", "mlp"), (1,), (2,)),
    "table": Weight(("vocab", "embed"), (0,), (1,), is_table=True),
    "head": Weight(("embed", "vocab"), (0,), (1,)),
    "scale": Weight(("norm",)),
}
SHAPES = {
    "w_in": (6, 10),
    "query": (6, 2, 4),
    "post": (2, 4, 6),
    "layers": {"query": (3, 6, 2, 4)},
    "experts": (2, 6, 5),
    "table": (9, 6),
    "head": (6, 9),
    "scale": (6,),
}
BY_ADAM = ("table", "head", "scale")


def _params() -> dict:
    shapes, structure = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return jax.tree.unflatten(structure, [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)])


def _grads(number: int) -> dict:
    return jax.tree.map(lambda p: jnp.sin(p * (number + 2)), _params())


def _ours(optimizer: Muon, steps: int = 3) -> dict:
    learner = Learner(optimizer=optimizer, learning_rate=0.01, clip_gradient_norm_to_value=None)
    params = _params()
    state = learner.init(params, WEIGHTS)
    update = jax.jit(functools.partial(learner.update, weights=WEIGHTS))
    for number in range(steps):
        params, state, _ = update(_grads(number), state, params, jnp.int32(number))
    return params


def _optax(names: tuple[str, ...], steps: int = 3, **kwargs) -> dict:
    params = {name: _params()[name] for name in names}
    theirs = optax.contrib.muon(0.01, adam_b2=0.95, **kwargs)
    state, update = theirs.init(params), jax.jit(theirs.update)
    for number in range(steps):
        grads = {name: _grads(number)[name] for name in names}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_equals_optax_on_matrices(consistent_rms):
    ours = _ours(Muon(consistent_rms=consistent_rms, weight_decay=0.3))
    theirs = _optax(("w_in",), consistent_rms=consistent_rms, weight_decay=0.3)
    np.testing.assert_allclose(ours["w_in"], theirs["w_in"], rtol=2e-5, atol=2e-6)
    theirs = _optax(BY_ADAM, muon_weight_dimension_numbers=dict.fromkeys(BY_ADAM))
    for name in BY_ADAM:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, atol=1e-7)


def _orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations with Jordan's coefficients."""
    transposed = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if transposed else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


@pytest.mark.parametrize(
    ("path", "rows", "columns"), [("query", 6, 8), ("post", 8, 6), ("experts", 6, 5), ("layers/query", 6, 8)]
)
def test_a_weight_is_the_matrix_of_its_matmul(path, rows, columns):
    ours, params, grad = _ours(Muon(nesterov=False, weight_decay=0.0), steps=1), _params(), _grads(0)
    for name in path.split("/"):
        ours, params, grad = ours[name], params[name], grad[name]
    matrices = np.asarray(grad, np.float64).reshape(-1, rows, columns)  # the bias correction undoes the first decay
    expected = np.stack([_orthogonalized(matrix) for matrix in matrices]) * 0.2 * max(rows, columns) ** 0.5
    np.testing.assert_allclose((params - ours) / 0.01, expected.reshape(grad.shape), rtol=2e-3, atol=2e-4)
