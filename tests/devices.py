"""CPU devices of the processes that tests start."""

from __future__ import annotations

import os


def cpu_devices(count: int) -> dict[str, str]:
    """The environment variable that gives JAX so many CPU devices; the other XLA flags of the tests are kept."""
    flags = (os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={count}")
    return {"XLA_FLAGS": " ".join(filter(None, flags))}
