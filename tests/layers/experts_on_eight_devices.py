"""Run on eight devices by test_moe_feed_forward.py: experts with biases and shared experts, on the mesh and off it."""

from __future__ import annotations

import os

from tests.devices import cpu_devices

os.environ.update(cpu_devices(8))

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import merge_rules
from paxcli.mesh.sharding import use_mesh
from tests.tolerances import FLOAT32

fields = dict(use_bias=True, activation="clamped_silu", shared_dims=16, shared_gate=True)
layer = MoeFeedForward(model_dims=8, hidden_dims=16, num_experts=4, **fields)
x = jax.random.normal(jax.random.key(0), (8, 6, 8))
shapes = jax.tree.map(jnp.shape, jax.eval_shape(layer.init, jax.random.key(1), x)["params"])
leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
params = structure.unflatten([0.3 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(leaves)])


def outcome(layer):
    """Value and gradients of the layer."""
    loss = jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(layer.apply({"params": params}, x))), (0, 1))
    return jax.jit(loss)(params, x)


for capacity in (None, 4.0):
    layer = layer.clone(capacity_factor=capacity)
    expected = outcome(layer)
    for shape in ({"data": 2, "tensor": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}):
        with use_mesh(build_mesh(Mesh(shape)), merge_rules(None)):
            found = outcome(layer)
        for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=f"{capacity} {shape} {path}")
            assert np.abs(theirs).max() > 1e-3, path
