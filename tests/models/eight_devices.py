"""Run on eight devices by test_chunked_loss.py: a loss in chunks on the mesh, and one of all logits off it."""

from __future__ import annotations

import os

from tests.devices import cpu_devices

os.environ.update(cpu_devices(8))

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.embedding import TiedEmbedding
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.sharding import constrain, use_mesh
from paxcli.models.chunked_loss import chunked_token_metrics
from paxcli.models.losses import token_metrics
from tests.tolerances import FLOAT32

B, T, D, V = 4, 16, 8, 32
HEAD = TiedEmbedding(vocab_size=V, model_dims=D, use_bias=True, logit_cap=3.0)
x, table = jax.random.normal(jax.random.key(0), (B, T, D)), jax.random.normal(jax.random.key(1), (V, D))
labels = jnp.arange(B * T).reshape(B, T) % V
weights = (labels % 3 > 0).astype(jnp.float32)
params = {"table": table, "bias": jnp.zeros(V)}


def outcome(chunk: int | None):
    """Metrics and gradients."""

    def loss(params, x):
        x = constrain(x, "activation_batch", "activation_length", None)
        head = HEAD.bind({"params": params})
        if chunk is None:
            found = token_metrics(head.logits(x), labels, weights)
        else:
            found = chunked_token_metrics(head.scorer(), x, labels, weights, chunk)
        return found[0]["loss"][0], found

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


expected = outcome(None)
for shape in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "stage": 2}, {"tensor": 8}):
    with use_mesh(build_mesh(Mesh(shape))):
        found = outcome(5)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=str(shape))
