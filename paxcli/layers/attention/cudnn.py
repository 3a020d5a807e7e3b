"""Attention by cuDNN's flash-attention kernel, on NVIDIA GPUs."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from paxcli.errors import first_line
from paxcli.layers.attention.backend import Context, Demand, FusedKernel, Operands


class CudnnAttention(FusedKernel):
    """`jax.nn.dot_product_attention` by cuDNN, on the devices of the mesh."""

    name = "cudnn"
    platform = "gpu"

    def refusal(self, demand: Demand, capability: str | None = None) -> str | None:
        is_hopper, dims, parts = float(capability or 0) >= 9.0, demand.dims_per_head, demand.length_parts
        most, value_dims = 256 if is_hopper else 128, demand.value_dims_per_head or dims
        widths = f"values have {value_dims} features a head, queries and keys {dims}"
        refusals = {
            "it has no soft cap of the logits": demand.logit_cap is not None,
            "it has no attention sinks": demand.sinks,
            f"it has no context parallelism, and each row is sharded over {parts} devices": parts > 1,
            f"it takes bfloat16, not {demand.dtype}: set `fprop_dtype`": demand.dtype not in ("bfloat16", "float16"),
            f"dims_per_head={dims} is above {most}, or not a multiple of 8": dims > most or dims % 8,
            f"the length, {demand.length}, is odd": demand.length % 2,
            f"{widths}: it needs Hopper": value_dims != dims and not is_hopper,
        }
        reason = super().refusal(demand, capability) or next((why for why, holds in refusals.items() if holds), None)
        return reason or _compile_failure(demand)

    def attend_on_device(self, operands: Operands, demand: Demand, context_axes: tuple[str, ...] = ()) -> Context:
        """Segments become a mask, which cuDNN takes as a bias [B, 1, T, T] in the dtype of the queries."""
        query, key, value, ids = operands[:4]
        context = jax.nn.dot_product_attention(
            *(jnp.swapaxes(part, 1, 2) for part in (query, key, value)),
            mask=None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None],
            scale=1.0,
            is_causal=demand.causal,
            local_window_size=None if demand.window is None else (demand.window - 1, 0),
            implementation="cudnn",
        )
        return jnp.swapaxes(context, 1, 2)


@functools.cache
def _compile_failure(demand: Demand) -> str | None:
    """Why cuDNN fails to compile such an attention and its gradient on this machine's GPU; None if it compiles."""
    if jax.default_backend() != "gpu":  # compiling for a GPU on another machine
        return None

    def compile_one() -> None:
        dims = (demand.dims_per_head, demand.value_dims_per_head or demand.dims_per_head)
        heads, values = (jax.ShapeDtypeStruct((1, 2, demand.length, size), demand.dtype) for size in dims)
        ids = jax.ShapeDtypeStruct((1, demand.length), jnp.int32)

        def total(*arrays: jax.Array) -> jax.Array:
            return CudnnAttention().attend_on_device(Operands(*arrays), demand).sum()

        jax.jit(jax.grad(total, (0, 1, 2))).lower(heads, heads, values, ids).compile()

    with ThreadPoolExecutor(1) as pool:  # a new thread, outside the mesh and the tracing under way
        try:
            pool.submit(compile_one).result()
        except Exception as error:  # noqa: BLE001 - whatever it is, training continues without cuDNN
            return first_line(error)
    return None
