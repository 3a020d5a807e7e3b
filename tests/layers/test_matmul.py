"""Matmuls with weights and their gradients, against those of JAX."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers import matmul
from paxcli.layers.matmul import OutputFirst, einsum, output_first
from paxcli.mesh.weights import Weight
from tests.layers.arrays import random_array
from tests.tolerances import BFLOAT16, FLOAT32

SIZES = {"b": 2, "t": 3, "d": 4, "e": 2, "f": 6, "n": 2, "h": 5, "v": 7}


@pytest.mark.parametrize(
    "equation",
    ["btd,df->btf", "btf,df->btd", "btd,dnh->btnh", "bnth,nhd->btd", "btd,dv->btv", "btd,vd->btv", "ebf,edf->ebd"],
)
def test_gradients_are_those_of_jax(equation: str) -> None:
    inputs, output = equation.split("->")
    x, w, grad = (random_array(*(SIZES[letter] for letter in letters)) for letters in (*inputs.split(","), output))
    for dtype, tolerance in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        given = x.astype(dtype), w.astype("float32")
        y, gradients = jax.vjp(lambda x, w: einsum(equation, x, w), *given)
        expected, expected_gradients = jax.vjp(lambda x, w: jnp.einsum(equation, x, w), *given)
        for found, correct in zip((y, *gradients(grad)), (expected, *expected_gradients(grad)), strict=True):
            assert found.dtype == correct.dtype
            np.testing.assert_allclose(*(np.asarray(z, "float32") for z in (found, correct)), **tolerance)


@pytest.mark.parametrize("equation", ["btd,dnh->btnh", "bnth,nhd->btd", "btd,vd->btv"])
def test_on_a_gpu_dimensions_are_contracted_in_their_order(equation: str, monkeypatch) -> None:
    """In another order, XLA transposes an operand. Which dimensions are contracted does not change."""
    monkeypatch.setattr(matmul, "current_device", lambda: SimpleNamespace(platform="gpu"))
    x, w = (random_array(*(SIZES[letter] for letter in letters)) for letters in equation.split("->")[0].split(","))

    def loss(x: jax.Array, w: jax.Array, einsum: Callable[..., jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(einsum(equation, x, w)))

    of_gpu, of_jax = (jax.value_and_grad(functools.partial(loss, einsum=one), (0, 1)) for one in (einsum, jnp.einsum))
    for found, expected in zip(*(jax.tree.leaves(one(x, w)) for one in (of_gpu, of_jax)), strict=True):
        np.testing.assert_allclose(found, expected, **FLOAT32)
    contracted = re.findall(r"dimension_numbers=\(\(\[([\d, ]+)\], \[([\d, ]+)\]\)", str(jax.make_jaxpr(of_gpu)(x, w)))
    assert len(contracted) == 3
    assert all(json.loads(f"[{axes}]") == sorted(json.loads(f"[{axes}]")) for pair in contracted for axes in pair)


@pytest.mark.parametrize("equation", ["btd,df->btf", "btf,df->btd", "btd,vd->btv", "btnh,dnh->btd", "ebf,edf->ebd"])
@pytest.mark.parametrize("batch", [1, 2, 40])
def test_matmuls_of_few_rows_and_of_many_are_those_of_jax(equation: str, batch: int) -> None:
    inputs, _ = equation.split("->")
    x, w = (random_array(*({**SIZES, "b": batch}[letter] for letter in letters)) for letters in inputs.split(","))
    jitted = jax.jit(einsum, static_argnums=0)
    np.testing.assert_allclose(jitted(equation, x, w), jnp.einsum(equation, x, w), **FLOAT32)
    num_rows = batch * SIZES["t"] if "t" in inputs else batch
    is_weight_first = "optimization_barrier" in jitted.lower(equation, x, w).as_text()
    assert is_weight_first == (equation != "btd,df->btf" and num_rows <= 64)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    ("equation", "contracts", "produces", "axes", "shapes"),
    [
        ("btd,df->btf", (0,), (1,), ("embed", "mlp"), {1: [(6, 4)], 2: [(6, 4)]}),
        ("btf,df->btd", (1,), (0,), ("embed", "mlp"), {1: [(4, 6)], 2: [(2, 6)] * 2}),
        ("btd,dnh->btnh", (0,), (1, 2), ("embed", "heads", "head_dim"), {1: [(2, 5, 4)], 2: [(1, 5, 4)] * 2}),
        ("bath,ahd->btd", (0, 1), (2,), ("heads", "head_dim", "embed"), {1: [(4, 2, 5)], 2: [(2, 2, 5)] * 2}),
        ("btd,dh->bth", (0,), (1,), ("embed", "vocab"), {1: [(5, 4)], 2: [(5, 4)]}),
    ],
)
def test_a_weight_stored_as_outputs_and_inputs_multiplies_the_same(
    equation, contracts, produces, axes, shapes, num_parts: int
) -> None:
    sizes = SIZES | {"a": 2}
    inputs, weight = equation.split("->")[0].split(",")
    x, w = (random_array(*(sizes[letter] for letter in letters)) for letters in (inputs, weight))
    stored = output_first(w, Weight(axes, contracts, produces, any_order=True), num_parts)
    assert isinstance(stored, OutputFirst) and [part.shape for part in stored.parts] == shapes[num_parts]
    multiply = jax.jit(lambda x, stored: stored.multiply(einsum, equation, x))
    np.testing.assert_allclose(multiply(x, stored), jnp.einsum(equation, x, w), **FLOAT32)
    assert "optimization_barrier" in multiply.lower(x, stored).as_text()


@pytest.mark.parametrize("facts", [Weight(any_order=True, num_stacked=1), Weight(contracts=(0,), produces=(1,))])
def test_other_weights_are_stored_as_they_are(facts: Weight) -> None:
    w = random_array(2, 3)
    assert output_first(w, facts) is w
