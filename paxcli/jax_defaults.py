"""Defaults for JAX, XLA and etils that have to be set before they are imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

GPU_MEMORY_FRACTION = 0.92
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def configure_jax(verbose_compiler: bool = False) -> None:
    """Sets environment variables that JAX and etils read when they are imported; the user's own values take precedence.

    - Compiled programs are cached on disk for the next start, in a directory that only this user can read.
    - On a GPU, XLA may allocate 92 % of the memory. JAX's default of 75 % is too little for large models.
    - Buckets are read with gcsfs, as on machines without TensorFlow, whose import takes seconds.
    - With libtpu or JAX's CUDA plugin installed but no accelerator on this machine, JAX runs on the CPU and does not
      search for one.

    Args:
      verbose_compiler: Whether XLA logs what it does.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the old name; XLA refuses both together
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    if verbose_compiler:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pax" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("EPATH_USE_TF", "false")
    if any(map(importlib.util.find_spec, ("libtpu", *CUDA_PLUGINS))) and not _has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def _has_accelerator() -> bool:
    """Whether the operating system lists a TPU or a GPU."""
    return any(any(Path("/dev").glob(name)) for name in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg"))
