"""Context parallelism of causal attention: an equal share of the work for each of the devices that share a row.

Each device has the keys and values of the row, gathered, and some of its queries (Llama 3: Grattafiori et al., 2024,
section 3.3.2). Under a causal mask later queries see more keys. So a row is divided into 2n chunks for n devices:
device i holds the chunks 2i and 2i + 1, and computes attention of the chunks i and 2n - 1 - i.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Bool, Int


def _balanced_chunks(num_devices: int) -> Int[np.ndarray, "2 n"]:
    """The two chunks that each of n devices computes: the even one, and the odd one."""
    early = np.arange(num_devices)
    late = 2 * num_devices - 1 - early
    return np.where(early % 2 == 0, [early, late], [late, early])


def balanced_positions(length: int, num_devices: int) -> Int[np.ndarray, " T"]:
    """The positions whose queries the devices compute: first those of device 0, last those of device n - 1."""
    return np.arange(length, dtype=np.int32).reshape(2 * num_devices, -1)[_balanced_chunks(num_devices).T].reshape(-1)


def exchange_chunks(x: jax.Array, mesh_axes: Sequence[str], axis: int, back: bool = False) -> jax.Array:
    """The two chunks of the row that this device computes, for the two that it holds, or `back`; inside `shard_map`.

    Args:
      x: Two chunks.
      mesh_axes: The mesh axes that shard the row.
      axis: The axis of positions.
      back: Whether to return computed chunks to the devices that hold them.
    """
    exchanged = []
    # Every device holds, and computes, one even and one odd chunk: each kind is one permutation of the devices.
    for half, chunks in zip(jnp.split(x, 2, axis), _balanced_chunks(jax.lax.axis_size(mesh_axes)), strict=True):
        moves = [(int(chunk) // 2, device) for device, chunk in enumerate(chunks)]
        moves = [(computing, holding) for holding, computing in moves] if back else moves
        exchanged.append(jax.lax.ppermute(half, mesh_axes, moves))
    return jnp.concatenate(exchanged, axis)


class CausalMask(masks.CausalMask):
    """The causal mask of queries in any order of positions."""

    def __init__(self, positions: Int[np.ndarray, " T"]):
        super().__init__((len(positions), len(positions)))
        self.q_sequence = positions

    def __getitem__(self, idx: tuple[slice, slice]) -> Bool[np.ndarray, "q k"]:
        """A block of the mask; most are all true or all false, and comparing 128k × 128k positions takes a minute."""
        queries, keys = self.q_sequence[idx[0]], range(self.shape[1])[idx[1]]
        is_seen = keys[-1] <= queries.min()
        if is_seen or keys[0] > queries.max():
            return np.full((len(queries), len(keys)), is_seen)
        return super().__getitem__(idx)
