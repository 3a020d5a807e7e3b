"""`pax doctor`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from typing import Any

from paxcli import __version__
from paxcli.cli.options import JsonOption
from paxcli.cli.output import say_result
from paxcli.errors import MissingError

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "fiddle", "grain")
OPTIONAL = {
    "tensorflow": "pip install tensorflow",
    "seqio": "pip install seqio",
    "lingvo": "pip install 'lingvo>=0.14'",
    "lm-eval": "pip install 'paxcli[eval]'",
    "libtpu": "pip install 'jax[tpu]'",
    "jax-cuda12-plugin": "pip install 'jax[cuda12]'",
    "jax-cuda13-plugin": "pip install 'jax[cuda13]'",
}
GCLOUD = "https://cloud.google.com/sdk/docs/install"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOOGLE_APPLICATION_CREDENTIALS", "JAX_COMPILATION_CACHE_DIR",
    "JAX_COORDINATOR_ADDRESS", "JAX_ENABLE_X64", "JAX_NUM_PROCESSES", "JAX_PLATFORMS", "JAX_PROCESS_ID",
    "LD_LIBRARY_PATH", "LIBTPU_INIT_ARGS", "NO_COLOR", "PAX_DEBUG", "XLA_CLIENT_MEM_FRACTION", "XLA_FLAGS",
)  # fmt: skip
PROBE = """
import collections, json, jax
kinds = collections.Counter((device.platform, device.device_kind) for device in jax.local_devices())
print(json.dumps([{"platform": p, "kind": kind, "count": count} for (p, kind), count in kinds.items()]))
"""
PROBE_SECONDS = 60


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine. Lists versions, devices and missing optional packages.

    \b
    Examples:
      pax doctor
      pax doctor --json
    """
    packages = {name: _version(name) for name in REQUIRED}
    devices, problem = _devices() if packages["jax"] and packages["jaxlib"] else ([], None)
    result = {
        "pax": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "optional": {name: {"version": _version(name), "get": get} for name, get in OPTIONAL.items()}
        | {"gcloud": {"version": shutil.which("gcloud"), "get": GCLOUD}},
        "devices": devices,
        "environment": {name: name in os.environ for name in VARIABLES},
    }
    hint = "JAX_PLATFORMS=cpu makes JAX use only the CPU."
    if missing := [name for name, version in packages.items() if version is None]:
        problem, hint = f"Not installed: {', '.join(missing)}.", f"pip install {' '.join(missing)}"
    say_result(result, _text(result), as_json, MissingError(problem, hint) if problem else None)


def _version(name: str) -> str | None:
    """The version of an installed package, read without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """The devices that JAX finds, or why it finds none. Runs in another process: an accelerator may never answer."""
    argv, pipe = [sys.executable, "-c", PROBE], subprocess.PIPE
    probe = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = probe.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"JAX found no devices in {PROBE_SECONDS} s: does another process or another host use them?"
    finally:
        _end(probe)
    if probe.returncode:
        return [], "JAX cannot start: " + (errors.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    return json.loads(output.strip().splitlines()[-1]), None


def _end(probe: subprocess.Popen[str]) -> None:
    """Kills a probe that still runs, without waiting for one that a driver keeps alive."""
    if probe.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(probe.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            probe.wait(timeout=2)
    for pipe in (probe.stdout, probe.stderr):
        if pipe:
            pipe.close()


def _text(result: dict[str, Any]) -> str:
    packages = {"pax": result["pax"], "python": result["python"], **result["packages"]}
    lines = [f"{name:<20}{version or 'missing'}" for name, version in packages.items()]
    devices = [f"  {found['count']} x {found['kind']} ({found['platform']})" for found in result["devices"]]
    lines += ["", "Devices", *(devices or ["  none"]), "", "Optional packages"]
    for name, part in result["optional"].items():
        lines.append(f"  {name:<18}{part['version'] or 'missing; install: ' + part['get']}")
    lines += ["", "Environment variables that are set"]
    lines += [f"  {name}" for name, is_set in result["environment"].items() if is_set] or ["  none"]
    return "\n".join(lines)
