"""Grouped matmul: rows sorted by group, each multiplied by the matrix of its group (MegaBlocks, Gale et al., 2022)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Float, Int

from paxcli.mesh.sharding import current_device

_ROWS = (512, 256, 128)  # of a tile; the kernel needs a divisor of R
_TILE = 1024  # largest tile of D and F in bfloat16: with 512 rows it fits the 16 MiB of VMEM of any TPU


def grouped_matmul(
    x: Float[jax.Array, "R D"], w: Float[jax.Array, "E D F"], sizes: Int[jax.Array, " G"], partitioned: bool = False
) -> Float[jax.Array, "R F"]:
    """Multiplies the first `sizes[0]` rows by `w[0]`, the following `sizes[1]` rows by `w[1]`, and so on.

    On TPUs, by a kernel of JAX (megablox) with kernels for both gradients: XLA:TPU computes the gradient of a
    `ragged_dot` with respect to `w` as a dense product over all E groups.

    Args:
      x: Rows, sorted by group.
      w: The matrix of each group.
      sizes: Number of rows of each group; they add up to R. G is E, or E + 1: the rows of the last group are not
        multiplied, and their outputs and gradients are 0.
      partitioned: Whether XLA partitions the arrays over devices, which it cannot do for a kernel.
    """
    rows = next((rows for rows in _ROWS if x.shape[0] % rows == 0), None)
    if rows is not None and not partitioned and current_device().platform == "tpu":
        return megablox_matmul(x, w, sizes, rows)
    if len(sizes) == len(w):
        return jax.lax.ragged_dot(x, w, sizes)
    is_in = (jnp.arange(len(x)) < jnp.sum(sizes[:-1]))[:, None]
    return jnp.where(is_in, jax.lax.ragged_dot(jnp.where(is_in, x, 0), w, sizes[:-1]), 0)


def megablox_matmul(
    x: Float[jax.Array, "R D"],
    w: Float[jax.Array, "E D F"],
    sizes: Int[jax.Array, " G"],
    rows: int,
    interpret: bool = False,
) -> Float[jax.Array, "R F"]:
    """What `grouped_matmul` computes, by megablox.

    Args:
      x: Rows, sorted by group.
      w: The matrix of each group.
      sizes: Number of rows of each group.
      rows: Rows of a tile; divides R.
      interpret: Whether to run on any device, slowly.
    """

    def tiling(_: int, contracted: int, produced: int) -> tuple[int, int, int]:
        return rows, min(_TILE * 2 // x.dtype.itemsize, contracted), min(_TILE, produced)

    @jax.custom_vjp
    def matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return gmm(x, w, sizes, x.dtype, tiling, interpret=interpret)

    def backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x, w, sizes = kept
        dx = gmm(dy, w, sizes, x.dtype, tiling, transpose_rhs=True, interpret=interpret)
        return dx, tgmm(x.T, dy, sizes, w.dtype, tiling, num_actual_groups=len(w), interpret=interpret), None

    matmul.defvjp(lambda *operands: (matmul(*operands), operands), backward)
    return matmul(x, w, sizes)
