"""Rotations, as HF `transformers` (tests/data/hf_families.py) and MaxText state them."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.layers.attention import rotary as module
from paxcli.layers.attention.rotary import Rotary
from paxcli.layers.attention.rotary_scaling import LinearScaling, YarnScaling
from tests.layers.arrays import random_array
from tests.models.hf_families import arrays_of
from tests.tolerances import FLOAT32


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("linear", LinearScaling(factor=8.0)), ("yarn", YarnScaling(factor=8.0, original_max_seq_len=64))],
)
def test_scaled_frequencies_are_those_of_transformers(kind, scaling):
    arrays = arrays_of(f"rotary/{kind}")
    frequencies, factor = scaling(1000.0 ** (-jnp.arange(16) / 16))
    np.testing.assert_allclose(frequencies, arrays["frequencies"], rtol=2e-5)
    assert factor == pytest.approx(arrays["factor"])


def test_time_scales_and_fraction():
    """Pair i of the part that turns takes `min * (max / min) ** (i / pairs)` positions for one radian."""
    x, position, pairs = jax.random.normal(jax.random.key(0), (1, 1, 1, 12)), 5, 3
    rotary = Rotary(dims_per_head=12, fraction=0.5, min_timescale=2.0, max_timescale=50.0)
    y = np.asarray(rotary.apply({}, x, jnp.array([[position]])))[0, 0, 0]
    flat = np.asarray(x)[0, 0, 0]
    angles = position / (2.0 * 25.0 ** (np.arange(pairs) / pairs))
    turned = (flat[:3] + 1j * flat[3:6]) * np.exp(1j * angles)
    np.testing.assert_allclose(y, np.concatenate([turned.real, turned.imag, flat[6:]]), **FLOAT32)


def test_rotary_keeps_lengths_and_sees_only_distances():
    rotary, x, y = Rotary(dims_per_head=6), random_array(1, 1, 1, 6), random_array(1, 1, 1, 6) ** 2
    turned = [rotary.apply({}, v, jnp.array([[p]])) for p in (2, 9) for v in (x, y)]
    np.testing.assert_allclose(jnp.linalg.norm(turned[0]), jnp.linalg.norm(x), rtol=1e-5)
    apart = [
        rotary.apply({}, x, jnp.array([[5 + s]])).ravel() @ rotary.apply({}, y, jnp.array([[s]])).ravel()
        for s in (0, 40)
    ]
    np.testing.assert_allclose(apart[0], apart[1], rtol=1e-4)
    assert not np.allclose(turned[0], turned[2])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_matmul_of_tpus_rotates_as_the_halves_of_other_devices(monkeypatch, fraction: float, dtype) -> None:
    layer = Rotary(dims_per_head=16, fraction=fraction)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8, 16), dtype)
    positions = jnp.broadcast_to(jnp.arange(8) * 37, (2, 8))

    def rotate(x: jax.Array) -> jax.Array:
        return layer.apply({}, x, positions)

    rotated, halves = jax.vjp(rotate, x)
    monkeypatch.setattr(module, "current_device", lambda: types.SimpleNamespace(platform="tpu"))
    by_matmul, swapped = jax.vjp(rotate, x)
    np.testing.assert_allclose(by_matmul.astype(jnp.float32), rotated.astype(jnp.float32), rtol=1e-6, atol=1e-6)
    # In bfloat16, each of the two parts of the gradient is rounded.
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    pairs = (swapped(by_matmul)[0].astype(jnp.float32), halves(rotated)[0].astype(jnp.float32))
    np.testing.assert_allclose(*pairs, rtol=tolerance, atol=tolerance)
