"""A small train state and its abstract version."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax


@flax.struct.dataclass
class State:
    """As a trainer would hold it: a dataclass, dictionaries, Optax's named tuples, an empty state."""

    step: Any
    params: Any
    opt_state: Any
    key: Any


def make_state(seed: int = 0, width: int = 32) -> State:
    random = np.random.default_rng(seed)
    params = {
        "decoder": {"w": jnp.asarray(random.standard_normal((width, 64)), jnp.float32), "b": jnp.zeros(64)},
        "table": jnp.asarray(random.standard_normal((259, width)), jnp.bfloat16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(jnp.int32(seed), params, optimizer.init(params), jax.random.key_data(jax.random.key(seed)))


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
