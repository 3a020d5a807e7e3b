"""Run on eight devices by attention/test_context_parallel.py: rows sharded over the mesh, and one device.

`python -m tests.layers.context_on_eight_devices attention` compares attention in two cases, `more-attention` in the
others, and `training` the steps of a model.
"""

from __future__ import annotations

import os

from tests.devices import cpu_devices

os.environ.update(cpu_devices(8))

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.attention import attention
from paxcli.layers.attention.backend import Demand, Operands
from paxcli.layers.attention.splash import SplashAttention
from paxcli.layers.attention.xla import dot_product_attention
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.sharding import use_mesh
from tests.tolerances import FLOAT32, PARALLEL
from tests.training.on_meshes import run

SPLASH = SplashAttention(interpret=True)
ALONE, MIXED = {"context": 4}, {"data": 2, "context": 2, "tensor": 2}


class Case(NamedTuple):
    """An attention of two rows and four heads."""

    mesh: dict[str, int]
    length: int = 1024
    kv_heads: int = 2
    segmented: bool = True
    sinks: bool = False
    causal: bool = True
    logit_cap: float | None = None
    window: int | None = None


CASES = (
    Case({"context": 2}, length=2816, window=200),  # backward in two kernels
    Case(MIXED, kv_heads=1, sinks=True),
)
MORE_CASES = (
    Case(ALONE, logit_cap=5.0),
    Case(ALONE, sinks=True, segmented=False),
    Case(ALONE, length=512),  # 128 positions on a device: no two chunks to balance
    Case(MIXED, causal=False, logit_cap=5.0),
)


def compare(case: Case) -> float:
    """Checks values and gradients against one masked softmax, and returns the largest difference."""
    shapes = [(2, heads, case.length, 16) for heads in (4, case.kv_heads, case.kv_heads)]
    query, *others = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    operands = [query / 4, *others, jnp.array([0.0, 1.0, -1.0, 2.0]) if case.sinks else None]
    positions = jnp.arange(case.length)
    segments = jnp.where(positions < jnp.array([[case.length // 3], [case.length]]), 1, 2)
    if not case.segmented:
        segments = jnp.ones_like(segments)
    distance = positions[:, None] - positions
    mask = segments[:, :, None] == segments[:, None]
    mask = mask & (distance >= 0) if case.causal else mask
    mask = mask if case.window is None else mask & (distance < case.window)

    def kernel(query, key, value, sinks):
        fields = dict(causal=case.causal, logit_cap=case.logit_cap, window=case.window, sinks=case.sinks)
        demand = Demand.of(query, value, **fields)
        assert demand.length_parts == case.mesh["context"] and SPLASH.refusal(demand) is None
        return SPLASH.attend(Operands(query, key, value, segments if case.segmented else None, sinks=sinks), demand)

    def plain(query, key, value, sinks):
        return dot_product_attention(query, key, value, mask, case.logit_cap, sinks=sinks)

    def outcome(attend):
        loss = jax.value_and_grad(
            lambda *operands: (jnp.sum(jnp.sin(context := attend(*operands))), context), (0, 1, 2, 3), has_aux=True
        )
        return jax.tree.leaves(jax.jit(loss)(*operands))

    expected = outcome(plain)
    devices = jax.devices()[: np.prod(list(case.mesh.values()))]
    with use_mesh(build_mesh(Mesh(case.mesh), devices)):
        found = outcome(kernel)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32, err_msg=str(case))
    return max(float(jnp.max(jnp.abs(ours - theirs))) for ours, theirs in zip(found[1:], expected[1:], strict=True))


def train() -> None:
    """Two steps of a model on a mesh with `context`, by the kernel, and on another without, by plain XLA."""
    sets = ["num_layers=2", "max_seq_len=1024", "task.model.model_dims=32", "task.model.hidden_dims=64"]
    sets += ["num_heads=2", "global_batch_size=8", "remat_policy=context"]
    case = {"recipe": "tiny-synthetic", "sets": [*sets, "mesh.ici_mesh_shape={data: 8}"], "steps": 2}
    expected = run(case)
    attention.choose_on_mesh = lambda *_: SPLASH
    found = run(case | {"sets": [*sets, "mesh.ici_mesh_shape={fsdp: 2, context: 4}"]})
    for name in (name for name in expected if not name.startswith("shard")):
        error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error <= PARALLEL, (name, error)


if __name__ == "__main__":
    if sys.argv[1] == "training":
        train()
    else:
        print([compare(case) for case in {"attention": CASES, "more-attention": MORE_CASES}[sys.argv[1]]])
