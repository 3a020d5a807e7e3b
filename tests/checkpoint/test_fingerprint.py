"""Fingerprints do not depend on an array's sharding, and differ for different arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.checkpoint.fingerprint import _on_device, _on_host, fingerprints

random = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "uint8", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 7, 3), (300, 257)])
def test_host_and_device_agree(dtype, shape):
    x = jnp.asarray(random.standard_normal(shape) * 50).astype(dtype)
    assert _on_host(np.asarray(x)) == int(_on_device(x))


def test_every_flipped_bit_and_every_swap_changes_the_fingerprint():
    x = random.standard_normal((40, 33)).astype(np.float32)
    before = fingerprints({"x": x})["x"]
    seen = {before}
    for index in range(0, x.size, 7):
        for bit in (0, 13, 31):
            changed = x.copy()
            changed.reshape(-1).view(np.uint32)[index] ^= np.uint32(1 << bit)
            seen.add(fingerprints({"x": changed})["x"])
    assert len(seen) == 1 + 3 * len(range(0, x.size, 7))
    assert fingerprints({"x": x[::-1]})["x"] != before
    assert fingerprints({"x": np.zeros_like(x)})["x"] != before
    signed = np.zeros(4, np.float32)
    assert fingerprints({"x": signed}) != fingerprints({"x": -signed})
