"""Run on eight devices by test_pipeline.py, with `all` or `some` of the cases: pipelines against the plain stack."""

from __future__ import annotations

import functools
import re
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.pipeline import to_layers
from paxcli.layers.pipelined_stack import PipelinedStack
from paxcli.layers.stack import Stack
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.rules import DEFAULT_RULES
from paxcli.mesh.sharding import param_shardings, put_batch, use_mesh
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from paxcli.programs.collectives import count_collectives
from paxcli.programs.hlo import read_program
from tests.layers.stages import to_stages
from tests.tolerances import PARALLEL

L, B, T = 8, 16, 8
WIDTHS = dict(vocab_size=32, max_seq_len=T, model_dims=16, hidden_dims=32, num_layers=L, num_heads=4)

# stages, microbatches, rounds, scanned, streamed, remat policy, ICI, DCN
CASES = [
    (2, 1, 1, True, False, "nothing", {"stage": 2, "data": 4}, None),
    (2, 2, 1, False, True, "dots", {"stage": 2, "fsdp": 4}, None),
    (2, 4, 1, True, True, "dots_with_no_batch_dims", {"stage": 2, "fsdp": 2, "tensor": 2}, None),
    (2, 4, 1, False, False, "context", {"stage": 2, "data": 2, "fsdp": 2}, None),
    (4, 1, 1, False, False, "everything", {"stage": 4, "data": 2}, None),
    (4, 2, 1, True, False, "out_proj", {"stage": 4, "fsdp": 2}, None),
    (4, 4, 1, True, True, "context_and_out_proj", {"stage": 4, "tensor": 2}, None),
    (2, 2, 2, True, True, "qkv_out_proj", {"stage": 2, "data": 2, "tensor": 2}, None),
    (2, 4, 2, False, False, "nothing", {"fsdp": 2, "tensor": 2}, {"stage": 2}),
    (2, 4, 2, True, True, "everything", {"fsdp": 4}, {"stage": 2}),
    (4, 4, 2, True, False, "everything", {"stage": 4, "fsdp": 2}, None),
    (4, 8, 2, False, True, "dots", {"stage": 4, "data": 2}, None),
    (4, 4, 1, True, False, "nothing", {"data": 2, "fsdp": 2, "tensor": 2}, None),  # stages side by side
    (2, 8, 1, True, True, "nothing", {"stage": 2, "data": 4}, None),  # 2 rows do not divide by data=4
]

# Both numbers of stages, rounds, scanned and unrolled, streamed and not, over DCN.
SOME = [CASES[i] for i in (1, 8, 10)]

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def batch() -> NestedMap:
    """Packed rows, some with padding."""
    ids = np.random.RandomState(0).randint(1, 32, (B, T + 1)).astype(np.int32)
    cut = np.arange(B)[:, None] % T
    position = np.broadcast_to(np.arange(T), (B, T))
    segment_ids = np.where(position < cut, 1, 2) * (position < T - (np.arange(B)[:, None] % 3))
    return NestedMap(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        segment_ids=segment_ids.astype(np.int32),
        segment_pos=np.where(position < cut, position, position - cut).astype(np.int32),
        weights=(segment_ids > 0).astype(np.float32),
    )


def loss_and_grads(model: LanguageModel, params, rows):
    def loss(params):
        return model.apply({"params": params}, rows)[0]["loss"][0]

    return jax.value_and_grad(loss)(params)


def unrolled(stack):
    return {f"layers_{i}": jax.tree.map(lambda p, i=i: p[i], stack["layers"]) for i in range(L)}


def check(case, plain_params, expected) -> None:
    """The same loss and the same gradients, from parameters that lie where the rules say."""
    stages, microbatches, rounds, scan, stream_io, policy, ici, dcn = case
    stack = functools.partial(
        PipelinedStack,
        num_stages=stages,
        num_microbatches=microbatches,
        circular_repeat=rounds,
        scan=scan,
        stream_io=stream_io,
        gather_weights_once=not scan,
        remat_policy=policy,
    )
    model = LanguageModel(**WIDTHS, stack=stack)
    mesh = build_mesh(Mesh(ici, dcn))
    rows = batch()
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.tree.map(lambda x: x[:1], rows)))["params"]
    layers = plain_params["stack"] if scan else unrolled(plain_params["stack"])
    params = {**plain_params, "stack": to_stages(layers, stages, rounds)}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, nn.meta.unbox(boxed))
    with use_mesh(mesh):
        params = jax.device_put(params, param_shardings(mesh, DEFAULT_RULES, boxed))
        for leaf in jax.tree.leaves(params["stack"]):
            where = leaf.sharding.spec[rounds > 1] if mesh.shape["stage"] > 1 else "stage"
            assert where == "stage", leaf.sharding
        loss, grads = jax.jit(functools.partial(loss_and_grads, model))(params, put_batch(rows, mesh))
    layers = to_layers(jax.device_get(grads)["stack"])
    if not scan:
        layers = {"layers": jax.tree.map(lambda *a: np.stack(a), *(layers[f"layers_{i}"] for i in range(L)))}
    found = jax.device_get({**grads, "stack": layers})
    np.testing.assert_allclose(loss, expected[0], rtol=PARALLEL)
    jax.tree_util.tree_map_with_path(assert_close, found, expected[1])


def laid_out(boxed, mesh):
    """Shapes of parameters, where the rules put them."""
    shardings = param_shardings(mesh, DEFAULT_RULES, boxed)
    return jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), nn.meta.unbox(boxed), shardings
    )


def count_gathers(gather_weights_once: bool) -> int:
    """How often a step of four stages gathers something over FSDP."""
    stack = functools.partial(PipelinedStack, num_stages=4, num_microbatches=8, gather_weights_once=gather_weights_once)
    model = LanguageModel(**WIDTHS, stack=stack)
    mesh = build_mesh(Mesh({"stage": 4, "fsdp": 2}))
    rows = batch()
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jax.tree.map(lambda x: x[:1], rows)))["params"]
    with use_mesh(mesh):
        params = laid_out(boxed, mesh)
        rows = put_batch(rows, mesh)
        text = jax.jit(functools.partial(loss_and_grads, model)).lower(params, rows).compile().as_text()
    found = count_collectives(read_program(text), None)
    return sum(one["count"] for one in found if one["kind"] == "all-gather")


def check_neighbours_only() -> None:
    """Streamed activations go to the next stage and nowhere else: each stage begins and ends with rows of its own."""
    stack = PipelinedStack(
        L, 16, 32, num_heads=4, dims_per_head=4, num_stages=8, num_microbatches=8, stream_io=True, scan=False
    )
    x, ids = jnp.zeros((8, T, 16)), jnp.ones((8, T), jnp.int32)
    boxed = jax.eval_shape(lambda: stack.init(jax.random.key(0), x, None, ids, ids))["params"]
    mesh = build_mesh(Mesh({"stage": 8}))
    with use_mesh(mesh):
        params = laid_out(boxed, mesh)
        program = jax.jit(stack.apply).lower({"params": params}, x, None, ids, ids).compile().as_text()
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", program)) for name in COLLECTIVES}
    assert found == {"all-gather": 0, "all-reduce": 0, "all-to-all": 0, "collective-permute": 2}, found


def assert_close(path, found, expected) -> None:
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= PARALLEL, f"{jax.tree_util.keystr(path)}: {error}"


if __name__ == "__main__":
    assert jax.device_count() == 8
    model = LanguageModel(**WIDTHS, stack=functools.partial(Stack, remat_policy="everything"))
    one = {name: jnp.asarray(value) for name, value in batch().items()}
    start = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), NestedMap(one))["params"])
    # Off their initial values, so that every scale and bias matters.
    keys = iter(jax.random.split(jax.random.key(1), 100))
    plain = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape), start)
    reference = jax.device_get(jax.jit(functools.partial(loss_and_grads, model))(plain, NestedMap(one)))
    failed = 0
    for case in CASES if sys.argv[1] == "all" else SOME:
        began = time.monotonic()
        try:
            check(case, jax.device_get(plain), reference)
            print(*case, f"ok in {time.monotonic() - began:.1f} s", flush=True)
        except AssertionError as error:
            failed += 1
            print(*case, "FAILED", str(error).strip(), flush=True)
    check_neighbours_only()
    print("neighbours only ok in no time")
    once, each = count_gathers(True), count_gathers(False)
    assert each > once + 2 * 6 * 11, (once, each)  # forward and backward, six matrices, iterations
    assert once < 11, once  # the buffer of rows is not gathered in each iteration
    print("weights gathered once ok in no time")
    sys.exit(failed)
