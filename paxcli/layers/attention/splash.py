"""Attention by JAX's splash kernel, on TPUs: skips the blocks that the mask hides, and stores no [T, T] array."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Float, Int

from paxcli.layers.attention.backend import Demand, FusedKernel
from paxcli.layers.remat import CONTEXT

_LANES = 128  # rows have to be a multiple of this
# The fused backward kernel saves two of seven matmuls, but holds one query gradient for each block of keys.
_MOST_PARTIAL_SUMS = 4
_MOST_KEY_BYTES = 2**19  # of its blocks; v4 has no VMEM for more


@dataclasses.dataclass(frozen=True)
class SplashAttention(FusedKernel):
    """`splash_attention` on the devices of the mesh.

    Attributes:
      interpret: Whether to run on any device, slowly.
    """

    interpret: bool = False

    name = "splash"
    platform = "tpu"

    def refusal(self, demand: Demand, capability: str | None = None) -> str | None:
        if reason := super().refusal(demand, capability):
            return reason
        return None if demand.length % _LANES == 0 else f"the length, {demand.length}, is not a multiple of {_LANES}"

    def kernel(self, demand: Demand) -> Callable[..., jax.Array]:
        options = dict(causal=demand.causal, logit_cap=demand.logit_cap, window=demand.window)
        return functools.partial(splash_attention, **options, interpret=self.interpret)


def splash_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K T H"],
    value: Float[jax.Array, "B K T Hv"],
    segment_ids: Int[jax.Array, "B T"] | None,
    sinks: Float[jax.Array, " N"] | None = None,
    causal: bool = True,
    logit_cap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "B N T Hv"]:
    """What `dot_product_attention` computes from scaled queries, on one TPU core.

    The output, and the log-sum-exp that the backward pass needs, are named as the context for remat policies.

    Args:
      query: Scaled queries.
      key: Keys; query head n reads key/value head n // (N / K) (GQA).
      value: Values, likewise.
      segment_ids: Positions see their own segment only; None = the whole row.
      sinks: One more logit of each head in its softmax.
      causal: Whether a position sees only itself and earlier ones.
      logit_cap: `cap * tanh(logit / cap)`; None = off.
      window: Number of positions seen, the query's own included; None = all.
      interpret: Whether to run on any device, slowly.
    """
    # Slow to import, and of use on TPUs only.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length, dims = query.shape[1:]
    shape = (length, length)
    if window is not None:
        mask: masks.Mask = masks.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**_block_sizes(length, dims, query.dtype.itemsize)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=logit_cap,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )

    def attend_row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
        segments = None if ids is None else splash.SegmentIds(ids, ids)
        return kernel(query, key, value, segments, sinks=sinks)  # pyrefly: ignore[bad-return]

    return jax.vmap(attend_row)(query, key, value, segment_ids)


def _block_sizes(length: int, dims: int, itemsize: int) -> dict[str, Any]:
    """At least two blocks, so that some can be skipped; the largest that fit the 16 MiB of VMEM of any TPU."""
    most = 1024 if dims <= _LANES and itemsize <= 2 else 512
    size = next((size for size in (1024, 512, 256) if size <= min(most, length // 2) and length % size == 0), _LANES)
    sizes = dict(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size)
    partial_sums = next(sums for sums in range(_MOST_PARTIAL_SUMS, 0, -1) if length // size % sums == 0)
    keys = length // partial_sums
    if keys == size:
        return {**sizes, "use_fused_bwd_kernel": True}
    if keys * max(dims, _LANES) * itemsize <= _MOST_KEY_BYTES:
        compute = max(size // 2, _LANES)
        return {**sizes, "block_kv_dkv": keys, "block_kv_dkv_compute": compute, "use_fused_bwd_kernel": True}
    return {**sizes, "block_q_dq": size, "block_kv_dq": size}
