"""Sharding on eight devices, in a subprocess."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.devices import cpu_devices

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_on_eight_devices():
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | cpu_devices(8)
    done = subprocess.run(
        [sys.executable, "-m", "tests.mesh.eight_devices"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") == 7
