"""Rows sharded over several devices: the order of queries, their mask, and one device against eight."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from paxcli.layers.attention.context_parallel import CausalMask, balanced_positions
from tests.conftest import ROOT


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_each_device_has_the_same_share_of_the_work(devices):
    positions = balanced_positions(48 * devices, devices)
    np.testing.assert_array_equal(np.sort(positions), np.arange(48 * devices))
    keys_seen = np.sum(positions.reshape(devices, -1) + 1, axis=1)
    assert len(set(keys_seen.tolist())) == 1


def test_the_mask_equals_that_of_jax():
    positions = balanced_positions(96, 3)
    ours, theirs = CausalMask(positions), masks.CausalMask((96, 96))
    theirs.q_sequence = positions
    for rows, columns in np.ndindex(6, 12):
        block = slice(16 * rows, 16 * rows + 16), slice(8 * columns, 8 * columns + 8)
        np.testing.assert_array_equal(ours[block], theirs[block])
    assert ours == CausalMask(positions) and ours != CausalMask(np.arange(96, dtype=np.int32))


@pytest.mark.parametrize("what", ["attention", pytest.param("more-attention", marks=pytest.mark.slow), "training"])
def test_on_eight_devices(what):
    """In a process of their own: attention on meshes with `context`, and a model that is trained on one."""
    command = [sys.executable, "-m", "tests.layers.context_on_eight_devices", what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
