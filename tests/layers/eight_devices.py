"""Run on eight devices by attention/test_kernels.py: a kernel on the mesh and off it."""

from __future__ import annotations

import os

from tests.devices import cpu_devices

os.environ.update(cpu_devices(8))

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.attention.backend import Demand, Operands
from paxcli.layers.attention.splash import SplashAttention
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import merge_rules
from paxcli.mesh.sharding import use_mesh, vmap_along
from tests.tolerances import FLOAT32

backend = SplashAttention(interpret=True)


def attend(query, key, value, ids):
    return backend.attend(Operands(query, key, value, ids), Demand.of(query, value))


query, key, value = (
    jax.random.normal(jax.random.key(seed), (2, 4, heads, 128, 8)) for seed, heads in enumerate((4, 2, 2))
)
segments = jnp.where(jnp.arange(128) < jnp.arange(8).reshape(2, 4, 1) * 20, 1, 2)


def outcome(run):
    """Value and gradients of a function of all heads."""
    loss = jax.value_and_grad(lambda *heads: jnp.sum(jnp.sin(run(*heads, segments))), (0, 1, 2))
    return jax.tree.leaves(jax.jit(loss)(query, key, value))


expected = outcome(jax.vmap(attend))
for shape in ([1, 2, 4], [2, 1, 1, 4]):
    staged = len(shape) == 4
    mesh = build_mesh(Mesh(shape))
    with use_mesh(mesh, merge_rules({"kv_heads": None})):
        found = outcome(vmap_along("activation_stage", attend) if staged else jax.vmap(attend))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=str(shape))
