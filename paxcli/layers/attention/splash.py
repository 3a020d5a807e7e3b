"""Attention by JAX's splash kernel, on TPUs: skips the blocks that the mask hides, and stores no [T, T] array."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxcli.layers.attention.backend import Context, Demand, FusedKernel, Operands
from paxcli.layers.remat import CONTEXT

_LANES = 128  # rows have to be a multiple of this
# The fused backward kernel saves two of seven matmuls, but holds one query gradient for each block of keys.
_MOST_PARTIAL_SUMS = 4  # for all queries of a row
_MOST_KEY_BYTES = 2**19  # of its blocks; v4 has no VMEM for more


@dataclasses.dataclass(frozen=True)
class SplashAttention(FusedKernel):
    """`jax.experimental.pallas.ops.tpu.splash_attention` on the devices of the mesh.

    Attributes:
      interpret: Whether to run on any device, slowly.
    """

    interpret: bool = False

    name = "splash"
    platform = "tpu"

    def refusal(self, demand: Demand, capability: str | None = None) -> str | None:
        length = demand.length // demand.length_parts
        reason = f"the length on a device, {length}, is not a multiple of {_LANES}" if length % _LANES else None
        return super().refusal(demand, capability) or reason

    def attend_on_device(self, operands: Operands, demand: Demand, context_axes: tuple[str, ...] = ()) -> Context:
        """Names its output, and the log-sum-exp that the backward pass needs, as the context for remat policies."""
        # Slow to import, and of use on TPUs only.
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        from paxcli.layers.attention.context_parallel import CausalMask, balanced_positions, exchange_chunks

        query, key, value, segment_ids, _, sinks = operands
        window, shards = demand.window, jax.lax.axis_size(context_axes)
        num_queries, dims = query.shape[2:]
        length = num_queries * shards
        # Without a mask, or with a window, devices have the same work anyway.
        is_balanced = demand.causal and window is None and shards > 1 and num_queries % (2 * _LANES) == 0
        if window is not None:
            mask: masks.Mask = masks.LocalMask((length, length), (window - 1, 0), 0)
        elif demand.causal:
            mask = CausalMask(balanced_positions(length, shards if is_balanced else 1))
        else:
            mask = masks.FullMask((num_queries, length))  # the same for all devices
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask]),  # one for all heads
            block_sizes=splash.BlockSizes(**_block_sizes(length, shards, is_balanced, dims, query.dtype.itemsize)),
            head_shards=1,
            q_seq_shards=mask.shape[0] // num_queries,
            attn_logits_soft_cap=demand.logit_cap,
            residual_checkpoint_name=CONTEXT,
            interpret=self.interpret,
        )
        key_ids: Any = segment_ids
        if demand.causal and context_axes:
            kernel = jax.tree.map(functools.partial(_rows_of_device, context_axes=context_axes), kernel)
        if context_axes:
            gather = functools.partial(jax.lax.all_gather, axis_name=context_axes, tiled=True)
            key, value, key_ids = gather(key, axis=2), gather(value, axis=2), gather(segment_ids, axis=1)
        if is_balanced:
            query = exchange_chunks(query, context_axes, axis=2)
            segment_ids = None if segment_ids is None else exchange_chunks(segment_ids, context_axes, axis=1)

        segments = None if segment_ids is None else splash.SegmentIds(segment_ids, key_ids)
        context = jax.vmap(functools.partial(kernel, sinks=sinks))(query, key, value, segments)
        return exchange_chunks(context, context_axes, axis=2, back=True) if is_balanced else context


def _block_sizes(length: int, shards: int, is_balanced: bool, dims: int, itemsize: int) -> dict[str, Any]:
    """At least two blocks, so that some can be skipped; the largest that fit the 16 MiB of VMEM of any TPU.

    Args:
      length: Number of keys.
      shards: Number of devices that share the queries.
      is_balanced: Whether each has two chunks of them, instead of one.
      dims: H.
      itemsize: Bytes of an element.
    """
    most = min(1024 if dims <= _LANES and itemsize <= 2 else 512, length // 2)
    queries, size = _largest_block(length // shards // (1 + is_balanced), most), _largest_block(length, most)
    sizes = dict(block_q=queries, block_kv=size, block_q_dkv=queries, block_kv_dkv=size)
    keys = length // next(sums for sums in range(_MOST_PARTIAL_SUMS * shards, 0, -1) if length // size % sums == 0)
    if keys == size:
        return {**sizes, "use_fused_bwd_kernel": True}
    if keys * max(dims, _LANES) * itemsize <= _MOST_KEY_BYTES:
        compute = max(size // 2, _LANES)
        return {**sizes, "block_kv_dkv": keys, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True}
    return {**sizes, "block_q_dq": queries, "block_kv_dq": size}


def _largest_block(length: int, most: int) -> int:
    return next((size for size in (1024, 512, 256) if size <= most and length % size == 0), _LANES)


def _rows_of_device(info: jax.Array, context_axes: tuple[str, ...]) -> jax.Array:
    """A device's rows of an array of the kernel's mask: of [1, blocks of queries, blocks of keys] or [T]."""
    parts = jnp.split(info, jax.lax.axis_size(context_axes), axis=min(info.ndim - 1, 1))
    return jnp.stack(parts)[jax.lax.axis_index(context_axes)]
