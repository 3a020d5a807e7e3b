"""A save of NumPy arrays writes from their own memory, however large they are."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

# Pages of zeros that were never written take no memory, so any more is a copy.
SAVE = """
import re, sys, threading
import numpy as np
from paxcli.checkpoint.manager import CheckpointStore
from paxcli.checkpoint.policy import Checkpoint
def now():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
with CheckpointStore(sys.argv[1], Checkpoint(async_save=False)) as store:
    store.save(0, {"small": np.ones(5, np.float32)}, {}, force=True)
    before, most, done = now(), [0], threading.Event()
    def watch():
        while not done.wait(0.005):
            most.append(max(most[-1], now()))
    thread = threading.Thread(target=watch)
    thread.start()
    store.save(1, {"large": np.zeros((17, 1 << 25), np.float32)}, {}, force=True)
    done.set()
    print(most[-1] - before)
"""


@pytest.mark.slow
def test_a_large_array_is_saved_without_a_copy(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2e8
