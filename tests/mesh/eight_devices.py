"""Run on eight devices by test_sharding.py: the same computation with and without the mesh."""

from __future__ import annotations

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from paxcli.errors import ConfigError
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.option_check import compile_with_each
from paxcli.mesh.rules import DEFAULT_RULES, merge_rules
from paxcli.mesh.sharding import constrain, infeed_shard, param_shardings, put_batch, shardings_like_params, use_mesh
from tests.tolerances import FLOAT32

D, F, V, L = 16, 32, 259, 2
MESH = build_mesh(Mesh([2, 2, 2]))
SHAPES = ([8, 1, 1], [1, 8, 1], [1, 1, 8], [4, 1, 2], [1, 4, 2], [1, 2, 4], [2, 4, 1], [2, 1, 4])


class Block(nn.Module):
    """A feed-forward layer with its logical axes."""

    @nn.compact
    def __call__(self, x, _):
        w = self.param("w", nn.with_logical_partitioning(nn.initializers.normal(0.5), ("embed", "mlp")), (D, F))
        x = constrain(x, "activation_batch", "activation_length", "activation_embed")
        hidden = constrain(jax.nn.gelu(x @ w), "activation_batch", "activation_length", "activation_mlp")
        return hidden @ w.T, None


class Model(nn.Module):
    """Embedding, scanned blocks, logits."""

    vocab: int = V

    @nn.compact
    def __call__(self, ids):
        init = nn.with_logical_partitioning(nn.initializers.normal(0.5), ("vocab", "embed"))
        table = self.param("table", init, (self.vocab, D))
        blocks = nn.scan(
            Block, {"params": 0}, split_rngs={"params": True}, length=L, metadata_params={nn.PARTITION_NAME: "layers"}
        )(name="blocks")
        scale = self.param("scale", nn.initializers.ones, (D,))
        return (blocks(table[ids], None)[0] * scale) @ table.T


def train(mesh, ids):
    """Two Adam steps from the same seed; the parameters and their shardings."""
    model, optimizer = Model(), optax.adam(1e-2)

    def init():
        params = nn.meta.unbox(model.init(jax.random.key(0), ids)["params"])
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state, ids):
        def loss(params):
            logits = model.apply({"params": params}, ids)
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

        updates, opt_state = optimizer.update(jax.grad(loss)(state["params"]), state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))["params"]
    shardings = param_shardings(mesh, DEFAULT_RULES, boxed)
    placed = shardings_like_params(jax.eval_shape(init), nn.meta.unbox(boxed), shardings, mesh)
    with use_mesh(mesh):
        state = jax.jit(init, out_shardings=placed)()
        batch = put_batch(ids, mesh)
        jitted = jax.jit(step, out_shardings=placed, donate_argnums=0)
        for _ in range(2):
            state = jitted(state, batch)
    return state


def check_training_agrees():
    """Eight devices compute the same as one, and each leaf is sharded according to the rules."""
    ids = np.arange(8 * 4, dtype=np.int32).reshape(8, 4) % V
    one = build_mesh(Mesh(), jax.devices()[:1])
    state, reference = train(MESH, ids), train(one, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), state, reference)
    kernel = P(None, "fsdp", "tensor")
    adam = state["opt_state"][0]
    for tree in (state["params"], adam.mu, adam.nu):
        assert tree["blocks"]["w"].sharding.spec == kernel
        assert tree["table"].sharding.spec == P(None, "fsdp")  # 259 does not divide by 2
        assert tree["scale"].sharding.is_fully_replicated
    assert adam.count.sharding.is_fully_replicated


def check_gradients_agree_on_every_mesh():
    """Gradients do not depend on the mesh shape."""
    ids = np.arange(8 * 4, dtype=np.int32).reshape(8, 4) % V
    boxed = Model().init(jax.random.key(0), ids)["params"]

    def loss(params, ids):
        logits = Model().apply({"params": params}, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    reference = jax.jit(jax.grad(loss))(nn.meta.unbox(boxed), ids)
    for mesh in (MESH, *(build_mesh(Mesh(shape)) for shape in SHAPES)):
        params = jax.device_put(nn.meta.unbox(boxed), param_shardings(mesh, DEFAULT_RULES, boxed))
        with use_mesh(mesh):
            grads = jax.jit(jax.grad(loss))(params, put_batch(ids, mesh))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **FLOAT32), grads, reference)


def check_constrain():
    """Layouts by name; odd sizes fall back; outside of a mesh nothing happens."""
    x = jnp.ones((8, 6, 4))
    assert constrain(x, "nonsense") is x
    axes = ("activation_batch", "activation_length", "activation_mlp")
    with use_mesh(MESH):
        even = jax.jit(lambda x: constrain(x, *axes))(x)
        assert even.sharding.is_equivalent_to(jax.NamedSharding(MESH, P(("data", "fsdp"), None, "tensor")), 3)
        part = jax.jit(lambda x: constrain(x, *axes))(jnp.ones((6, 6, 4)))  # data divides 6 rows, data × fsdp does not
        assert part.sharding.is_equivalent_to(jax.NamedSharding(MESH, P("data", None, "tensor")), 3)
        odd = jax.jit(lambda x: constrain(x, *axes))(jnp.ones((7, 6, 4)))
        assert odd.sharding.is_equivalent_to(jax.NamedSharding(MESH, P(None, None, "tensor")), 3)
        mapped = jax.shard_map(lambda x: constrain(x, *axes), in_specs=P("data"), out_specs=P("data"))
        assert jax.jit(mapped)(x).shape == x.shape
    with use_mesh(MESH, merge_rules({"activation_mlp": None})):
        y = jax.jit(lambda x: constrain(x * 2, *axes))(x)
        assert y.sharding.is_equivalent_to(jax.NamedSharding(MESH, P(("data", "fsdp"))), 3)


def check_batches():
    """Rows over data × fsdp; a batch that does not divide is refused."""
    batch = put_batch({"ids": np.arange(32).reshape(8, 4), "seed": np.arange(8)}, MESH)
    assert batch["ids"].sharding.spec == P(("data", "fsdp", "expert"))
    assert batch["ids"].addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(batch["ids"], np.arange(32).reshape(8, 4))
    assert infeed_shard(MESH) == (1, 0)
    try:
        put_batch({"ids": np.zeros((6, 4))}, MESH)
    except ConfigError as error:
        assert "6 examples" in error.message and "multiple of 4" in error.hint
    else:
        raise AssertionError("accepted")


def check_indivisible_parameters():
    """A vocabulary is replicated and logged; anything else is an error that names the way out."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pax").addHandler(handler)
    logging.getLogger("pax").setLevel(logging.INFO)
    boxed = jax.eval_shape(lambda: Model().init(jax.random.key(0), jnp.zeros((8, 4), jnp.int32)))["params"]
    param_shardings(MESH, DEFAULT_RULES, boxed)
    assert lines == ["Parameter `table`: `vocab` of 259 does not divide over tensor=2: replicated."], lines
    wide = build_mesh(Mesh({"tensor": 8}))
    query = nn.with_logical_partitioning(jnp.zeros, ("embed", "heads", "head_dim"))((16, 12, 4))
    try:
        param_shardings(wide, DEFAULT_RULES, {"attention": {"query": query}})
    except ConfigError as error:
        assert "`attention.query`" in error.message and "`heads` of 12" in error.message and "tensor=8" in error.message
        assert "{heads: null}" in error.hint
    else:
        raise AssertionError("accepted")


def check_like_params():
    """Copies follow their parameter, factored moments the dimensions that they have; everything else is replicated."""
    params = {"a": {"w": jnp.zeros((2, 256, 128))}, "w": jnp.zeros((4, 4))}
    specs = {"a": {"w": P(None, "fsdp", "tensor")}, "w": P("tensor")}
    shardings = jax.tree.map(lambda s: jax.NamedSharding(MESH, s), specs, is_leaf=lambda s: isinstance(s, P))
    optimizer = optax.chain(
        optax.masked(optax.trace(0.9), {"a": True, "w": False}), optax.scale_by_factored_rms(), optax.scale_by_adam()
    )
    placed = shardings_like_params(jax.eval_shape(optimizer.init, params), params, shardings, MESH)
    masked, factored, adam = placed
    assert masked.inner_state.trace["a"]["w"].spec == P(None, "fsdp", "tensor")
    assert factored.v_row["a"]["w"].spec == P(None, "tensor") and factored.v_col["a"]["w"].spec == P(None, "fsdp")
    assert factored.v_row["w"].spec == P() and factored.v["w"].spec == P("tensor")
    assert adam.mu["w"].spec == P("tensor") and adam.count.spec == P()


def check_compiler_options():
    """They are checked on one device, also where the current mesh has others."""
    with use_mesh(MESH):
        errors = compile_with_each("cpu", {"xla_cpu_enable_fast_math": False, "xla_cpu_no_such_option": True})
    assert [error is None for error in errors.values()] == [True, False], errors


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name, "ok")
