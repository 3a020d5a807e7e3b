"""Attention by JAX's splash kernel, on TPUs: causal blocks that see nothing are skipped, and no [T, T] array exists."""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Float, Int

from paxcli.layers.remat import CONTEXT

LANES = 128  # a row has to be a multiple of this
# Backward in one kernel saves two of seven products, but holds the gradient of the queries once for each block of keys.
_MOST_PARTIAL_SUMS = 4


def splash_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K T H"],
    value: Float[jax.Array, "B K T H"],
    segment_ids: Int[jax.Array, "B T"] | None,
    causal: bool = True,
    logit_cap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "B N T H"]:
    """What `dot_product_attention` computes of scaled queries, on one TPU core.

    Its output and the log-sum-exp that the backward pass needs bear the name of the context, for remat policies.

    Args:
      query: Scaled queries.
      key: Keys; head n of the queries reads head n // (N / K).
      value: Values, likewise.
      segment_ids: Who sees whom; None = all.
      causal: Whether a position sees only itself and earlier ones.
      logit_cap: `cap * tanh(logit / cap)`; None = off.
      window: How many positions it sees of those, itself among them; None = all.
      interpret: Whether to run on any device, slowly.
    """
    heads, length, dims = query.shape[1:]
    shape = (length, length)
    if window is not None:
        mask: masks.Mask = masks.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=_block_sizes(length, dims, query.dtype.itemsize),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=logit_cap,
        residual_checkpoint_name=CONTEXT,
        interpret=interpret,
    )

    def of_row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
        segments = None if ids is None else splash.SegmentIds(ids, ids)
        return kernel(query, key, value, segments)  # pyrefly: ignore[bad-return]

    return jax.vmap(of_row)(query, key, value, segment_ids)


def _block_sizes(length: int, dims: int, itemsize: int) -> splash.BlockSizes:
    """At least two blocks, so that there is something to skip; the largest that fit the 16 MiB of VMEM of any TPU."""
    most = 1024 if dims <= LANES and itemsize <= 2 else 512
    size = next((size for size in (1024, 512, 256) if size <= min(most, length // 2) and length % size == 0), LANES)
    sizes = dict(block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size)
    if length // size <= _MOST_PARTIAL_SUMS:
        return splash.BlockSizes(**sizes, use_fused_bwd_kernel=True)
    return splash.BlockSizes(**sizes, block_q_dq=size, block_kv_dq=size)
