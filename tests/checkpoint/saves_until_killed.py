"""Run by test_kill.py: saves about 20 MB of new random data in a loop, until it is killed."""

from __future__ import annotations

import itertools
import sys
import zlib

import jax.numpy as jnp
import numpy as np

from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint

store = CheckpointStore(sys.argv[1], Checkpoint(save_interval_steps=1, save_max_to_keep=3))
for step in itertools.count((store.latest_step() or 0) + 1):
    data = np.random.default_rng(step).random((5, 1_000_000), np.float32)
    store.save(step, {"rows": [jnp.asarray(row) for row in data]}, {"crc": zlib.crc32(data)})
    print(step, flush=True)
