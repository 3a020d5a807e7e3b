"""Attention by cuDNN's flash kernel, on NVIDIA's GPUs."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from paxcli.errors import first_line


def cudnn_refusal(
    dtype: str, dims_per_head: int, length: int, logit_cap: float | None, capability: str | None
) -> str | None:
    """Why cuDNN cannot do an attention; None if it can.

    Args:
      dtype: Of queries, keys and values.
      dims_per_head: H.
      length: T.
      logit_cap: Soft cap on the logits.
      capability: The GPU's compute capability, such as `9.0`; None = not known.
    """
    most = 256 if float(capability or 0) >= 9.0 else 128
    if logit_cap is not None:
        return "it has no soft cap of the logits"
    if dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16, not {dtype}: set `fprop_dtype`"
    if dims_per_head > most or dims_per_head % 8:
        return f"dims_per_head={dims_per_head} is above {most}, or no multiple of 8"
    if length % 2:
        return f"the length, {length}, is odd"
    return None


@functools.cache
def cudnn_failure(length: int, dims_per_head: int, dtype: str, causal: bool, window: int | None) -> str | None:
    """Why cuDNN fails to compile such an attention and its gradient on this machine's GPU; None if it compiles."""
    if jax.default_backend() != "gpu":  # compiling for a GPU elsewhere
        return None

    def compile_one() -> None:
        heads = jax.ShapeDtypeStruct((1, 2, length, dims_per_head), dtype)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        attend = functools.partial(cudnn_attention, causal=causal, window=window)
        jax.jit(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2))).lower(heads, heads, heads, ids).compile()

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which knows neither the mesh nor the tracing under way
        try:
            pool.submit(compile_one).result()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without cuDNN
            return first_line(error)
    return None


def cudnn_attention(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K T H"],
    value: Float[jax.Array, "B K T H"],
    segment_ids: Int[jax.Array, "B T"] | None,
    causal: bool = True,
    window: int | None = None,
) -> Float[jax.Array, "B N T H"]:
    """What `dot_product_attention` computes of scaled queries, on one GPU.

    Segments become a mask, which cuDNN takes as a bias [B, 1, T, T] in the type of the queries.

    Args:
      query: Scaled queries.
      key: Keys; head n of the queries reads head n // (N / K).
      value: Values, likewise.
      segment_ids: Who sees whom; None = all.
      causal: Whether a position sees only itself and earlier ones.
      window: How many positions it sees of those, itself among them; None = all.
    """
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    context = jax.nn.dot_product_attention(
        *(jnp.swapaxes(part, 1, 2) for part in (query, key, value)),
        mask=mask,
        scale=1.0,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return jnp.swapaxes(context, 1, 2)
