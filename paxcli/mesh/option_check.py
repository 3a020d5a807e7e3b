"""Checks which compiler options the installed XLA accepts.

As a subprocess, `python -m paxcli.mesh.option_check tpu` reads `{name: value}` as JSON from stdin, and prints
`{name: error or null}`. It needs no accelerator: TPU options are tried with libtpu's compiler, GPU options with the CPU
compiler, which accepts the same options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from paxcli.errors import first_line

_TOPOLOGY = "v5e:2x2"


def compile_with_each(platform: str, options: dict[str, Any]) -> dict[str, str | None]:
    """XLA's error message for each option, or None if it accepts it."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    device = jax.local_devices()[0]
    if platform == "tpu":
        device = topologies.get_topology_desc(platform="tpu", topology_name=_TOPOLOGY).devices[0]
    argument = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    with jax.set_mesh(Mesh(np.array([device]), ("one",))):  # not that of the caller, which may have other devices
        lowered = jax.jit(lambda x: x + 1).lower(argument)  # one operation, to compile with each option
    errors: dict[str, str | None] = {}
    for name, value in options.items():
        try:
            lowered.compile(compiler_options={name: value})
            errors[name] = None
        except Exception as error:  # noqa: BLE001 - the error is the result
            errors[name] = first_line(error)
    return errors


def run_check(platform: str, options: dict[str, Any], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs this module in another process, with these environment variables. libtpu may end it."""
    command = [sys.executable, "-m", "paxcli.mesh.option_check", platform]
    return subprocess.run(command, input=json.dumps(options), capture_output=True, text=True, env=environment)


if __name__ == "__main__":
    # The parent process may hold the TPU; this one does not need it.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    print(json.dumps(compile_with_each(sys.argv[1], json.load(sys.stdin))))
