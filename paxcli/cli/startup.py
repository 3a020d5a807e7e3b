"""What must be set before JAX starts, and before this process does."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_STARTED = "PAX_STARTED"
_GPU_MEMORY_FRACTION = "0.92"
_TUNABLE = "glibc.malloc.hugetlb"


def restart_tuned() -> None:
    """Starts this process again, once, with huge pages for large allocations, where that helps and can be had.

    XLA on a CPU maps its scratch memory afresh in every step; with huge pages that takes a few hundred page faults
    instead of a hundred thousand, a quarter of the step. The C library reads this setting only at process start.
    """
    if os.environ.pop(_STARTED, None) or not _huge_pages_on_request():
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_TUNABLE}=1")))
    os.environ[_STARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def configure_jax(compiling_aloud: bool = False) -> None:
    """Sets what JAX reads when it is imported, where the user has not.

    Compiled programs are kept for the next start, in a directory that only this user can read. On a GPU JAX would take
    three quarters of the memory, which large models and their optimizers need more of.

    Args:
      compiling_aloud: Let XLA log what it does, for whoever has to know.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the old name; XLA refuses both together
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", _GPU_MEMORY_FRACTION)
    if compiling_aloud:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pax" / "jax"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if importlib.util.find_spec("libtpu") and not _has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX would look for a TPU, and complain at length
    try:
        Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


def _has_accelerator() -> bool:
    """Whether the system shows a TPU or a GPU."""
    return any(any(Path("/dev").glob(name)) for name in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg"))


def _huge_pages_on_request() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return sys.platform == "linux" and setting.exists() and "[madvise]" in setting.read_text()
