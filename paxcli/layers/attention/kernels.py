"""The attention backends by name, and the choice among them: by the platform of the mesh's devices and the demand."""

from __future__ import annotations

import functools
from typing import Literal

from paxcli.errors import ConfigError
from paxcli.layers.attention.backend import AttentionBackend, Demand
from paxcli.layers.attention.cudnn import CudnnAttention
from paxcli.layers.attention.splash import SplashAttention
from paxcli.layers.attention.xla import XlaAttention
from paxcli.log import log
from paxcli.mesh.sharding import current_device

XLA = XlaAttention()
BACKENDS: dict[str, AttentionBackend] = {one.name: one for one in (XLA, SplashAttention(), CudnnAttention())}

_log_once = functools.cache(log.info)

Kernel = Literal["auto", "xla", "splash", "cudnn"]


def choose(
    asked: Kernel, demand: Demand, platform: str, capability: str | None = None
) -> tuple[AttentionBackend, str | None]:
    """The backend for a demand, and why it is not the platform's own, if it is not.

    Args:
      asked: The recipe's `kernel`.
      demand: The attention to compute.
      platform: `cpu`, `gpu` or `tpu`, of the devices of the mesh.
      capability: A GPU's compute capability, such as `9.0`; None = unknown.

    Raises:
      ConfigError: The recipe names a backend that cannot serve.
    """
    own = next((backend for backend in BACKENDS.values() if backend.platform == platform), XLA)
    backend = own if asked == "auto" else BACKENDS[asked]
    if backend.platform is not None and backend.platform != platform:
        reason = f"it runs on {backend.platform.upper()}s, and the devices of the mesh are {platform.upper()}s"
    else:
        reason = backend.refusal(demand, capability)
    if reason is None:
        return backend, None
    if asked == "auto":
        return XLA, f"{backend.name} cannot serve: {reason}"
    raise ConfigError(f"attention.kernel={asked}: {reason}.", "Set `kernel` to `auto`, which uses what can serve.")


def choose_on_mesh(asked: Kernel, demand: Demand) -> AttentionBackend:
    """`choose` for the devices of the mesh in use. Logs each choice once, except on CPUs, which have only one."""
    device = current_device()
    backend, reason = choose(asked, demand, device.platform, getattr(device, "compute_capability", None))
    if device.platform != "cpu":
        _log_once("Attention runs on %s%s.", backend.name, f", since {reason}" if reason else "")
    return backend
