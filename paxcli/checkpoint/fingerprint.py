"""A 32-bit fingerprint of an array's bits, independent of its sharding.

Each element, as a 32-bit word, is hashed with its index, and the hashes are summed modulo 2³². A change of any single
word changes the sum. The order of addition does not matter, so each device sums its own shard. The storage layer
detects less: with a flipped bit in an uncompressed chunk, or a missing chunk, a restore would succeed.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORD, _INDEX, _MIX, _MORE = (np.uint32(odd) for odd in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F))
_BLOCK = 1 << 18  # words; in the CPU's cache, and large enough that threads seldom wait for the GIL
_BLOCK_INDICES = np.arange(_BLOCK, dtype=np.uint32) * _INDEX
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def fingerprints(arrays: Mapping[str, Any]) -> dict[str, int]:
    """The fingerprint of each array, computed on the array's own device without transferring it."""
    return start_fingerprints(arrays)()


def start_fingerprints(arrays: Mapping[str, Any]) -> Callable[[], dict[str, int]]:
    """`fingerprints` in two parts: devices start on theirs, and the function that is returned computes the others.

    That function can run in any thread. Until it returns, nothing may change or donate the arrays in host memory.
    """
    host = {name: x for name, x in arrays.items() if in_host_memory(x)}
    on_device = {name: _on_device(x) for name, x in arrays.items() if name not in host}

    def finish() -> dict[str, int]:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            on_host = dict(zip(host, threads.map(_on_host, host.values()), strict=True))
        return on_host | {name: int(value) for name, value in jax.device_get(on_device).items()}

    return finish


def in_host_memory(x: Any) -> bool:
    """Whether all of `x` is in this process's CPU memory."""
    return not isinstance(x, jax.Array) or (x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices()))


def _on_host(x: Any) -> int:
    words = np.ascontiguousarray(x).reshape(-1).view(_UNSIGNED[x.dtype.itemsize])
    total = 0
    for start in range(0, words.size, _BLOCK):
        block = np.multiply(words[start : start + _BLOCK], _WORD, dtype=np.uint32)
        block += _BLOCK_INDICES[: block.size]
        block += np.uint32(start * int(_INDEX) % 2**32)
        total += int(_mix(block).sum(dtype=np.uint32))
    return total % 2**32


@jax.jit
def _on_device(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(_mix(words * _WORD + index * _INDEX), dtype=jnp.uint32)


def _mix(words: Any) -> Any:
    """The hash of each word; a NumPy array is changed in place."""
    words ^= words >> 16
    words *= _MIX
    words ^= words >> 13
    words *= _MORE
    words ^= words >> 16
    return words
