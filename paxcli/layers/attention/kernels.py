"""Which kernel an attention runs on: chosen here alone, by the devices of the mesh and by what is asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from paxcli.errors import ConfigError
from paxcli.layers.attention.cudnn import cudnn_attention, cudnn_failure, cudnn_refusal
from paxcli.layers.attention.splash import LANES, splash_attention
from paxcli.layers.scopes import ATTENTION_CORE
from paxcli.log import log
from paxcli.mesh.sharding import current_device, layout, split

Kernel = Literal["auto", "xla", "splash", "cudnn"]

HEADS = ("activation_batch", "activation_heads", "activation_length", None)
_PLATFORM_OF = {"splash": "tpu", "cudnn": "gpu"}


@dataclasses.dataclass(frozen=True)
class Demand:
    """What an attention asks of a kernel.

    Attributes:
      length: T.
      dims_per_head: H.
      dtype: Of queries, keys and values.
      causal: Whether a position sees only itself and earlier ones.
      logit_cap: Soft cap on the logits.
      window: Positions seen.
      biased: Whether the logits get a learned bias.
      length_parts: Over how many devices a row is cut.
    """

    length: int
    dims_per_head: int
    dtype: str
    causal: bool = True
    logit_cap: float | None = None
    window: int | None = None
    biased: bool = False
    length_parts: int = 1


def choose(asked: Kernel, demand: Demand, platform: str, capability: str | None = None) -> tuple[str, str | None]:
    """The kernel for a demand, and why it is not the platform's own, if it is not.

    Args:
      asked: The recipe's `kernel`.
      demand: What the kernel has to compute.
      platform: `cpu`, `gpu` or `tpu`, of the devices of the mesh.
      capability: A GPU's compute capability, such as `9.0`; None = not known.

    Raises:
      ConfigError: The recipe names a kernel that cannot do it.
    """
    own = next((kernel for kernel, runs_on in _PLATFORM_OF.items() if runs_on == platform), "xla")
    kernel = own if asked == "auto" else asked
    if kernel == "xla":
        return "xla", None
    if _PLATFORM_OF[kernel] != platform:
        reason = f"it runs on {_PLATFORM_OF[kernel].upper()}s, and the mesh is of {platform.upper()}s"
    else:
        reason = _refusal(kernel, demand, capability)
    if reason is None:
        return kernel, None
    if asked == "auto":
        return "xla", f"{kernel} cannot serve: {reason}"
    raise ConfigError(f"attention.kernel={kernel}: {reason}.", "Leave `kernel` at `auto`, which takes what serves.")


def _refusal(kernel: str, demand: Demand, capability: str | None) -> str | None:
    """Why a kernel cannot do a demand on its own platform; None if it can."""
    if demand.biased:
        return "it knows no learned bias of the logits"
    if demand.length_parts > 1:
        return f"rows are cut over {demand.length_parts} devices"
    if kernel == "splash":
        return None if demand.length % LANES == 0 else f"the length, {demand.length}, is not a multiple of {LANES}"
    refusal = cudnn_refusal(demand.dtype, demand.dims_per_head, demand.length, demand.logit_cap, capability)
    return refusal or cudnn_failure(demand.length, demand.dims_per_head, demand.dtype, demand.causal, demand.window)


@jax.named_scope(ATTENTION_CORE)
def fast_attention(
    asked: Kernel,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K T H"],
    value: Float[jax.Array, "B K T H"],
    segment_ids: Int[jax.Array, "B T"] | None,
    causal: bool,
    logit_cap: float | None,
    window: int | None,
    biased: bool,
) -> Float[jax.Array, "B N T H"] | None:
    """Attention of scaled queries on the kernel of the mesh's devices; None where plain XLA has to do it.

    A kernel names its output and what its backward pass needs after the context, for remat policies.
    """
    demand = Demand(
        query.shape[2],
        query.shape[3],
        query.dtype.name,
        causal=causal,
        logit_cap=logit_cap,
        window=window,
        biased=biased,
        length_parts=split(query.shape, *HEADS)[2],
    )
    device = current_device()
    kernel, reason = choose(asked, demand, device.platform, getattr(device, "compute_capability", None))
    if device.platform != "cpu":
        _say(kernel, reason)
    if kernel == "splash":
        attend = functools.partial(splash_attention, causal=causal, logit_cap=logit_cap, window=window)
    elif kernel == "cudnn":
        attend = functools.partial(cudnn_attention, causal=causal, window=window)
    else:
        return None
    return on_shards(attend, query, key, value, segment_ids)


@functools.cache
def _say(kernel: str, reason: str | None) -> None:
    """Once for each choice and reason."""
    log.info("Attention runs on %s%s.", kernel, f", since {reason}" if reason else "")


def on_shards(
    attend: Callable[..., jax.Array],
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K T H"],
    value: Float[jax.Array, "B K T H"],
    segment_ids: Int[jax.Array, "B T"] | None,
) -> Float[jax.Array, "B N T H"]:
    """`attend(query, key, value, segment_ids)` of each device's rows and heads, of which XLA knows no partition."""
    laid_out = layout(query.shape, *HEADS)
    if laid_out is None:
        return attend(query, key, value, segment_ids)
    rows, heads = laid_out[0], laid_out[1]
    ways = split(query.shape, *HEADS)[1]
    num_heads, kv_heads = query.shape[1], key.shape[1]
    # Where there are fewer key/value heads than devices, each device gets the one that its queries read.
    copies = next(
        n for n in range(1, num_heads // kv_heads + 1) if (num_heads // kv_heads) % n == 0 == kv_heads * n % ways
    )
    if copies > 1:
        key, value = (jnp.repeat(part, copies, axis=1) for part in (key, value))
    whole = PartitionSpec(rows, heads)
    return jax.shard_map(
        attend,
        in_specs=(whole, whole, whole, None if segment_ids is None else PartitionSpec(rows)),
        out_specs=whole,
        check_vma=False,
    )(query, key, value, segment_ids)
