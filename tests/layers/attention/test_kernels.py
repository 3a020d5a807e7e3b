from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from paxcli.errors import ConfigError
from paxcli.layers.attention import attention as attention_module
from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.backend import AttentionBackend, Demand, Operands
from paxcli.layers.attention.cross_attention import CrossAttention
from paxcli.layers.attention.cudnn import CudnnAttention
from paxcli.layers.attention.kernels import BACKENDS, choose
from paxcli.layers.attention.splash import SplashAttention
from paxcli.layers.attention.xla import dot_product_attention
from paxcli.layers.remat import saveable
from paxcli.layers.stack import Stack
from paxcli.mesh.mesh import Mesh, build_mesh
from paxcli.mesh.sharding import use_mesh
from tests.conftest import ROOT
from tests.tolerances import FLOAT32

DEMAND = Demand(length=256, dims_per_head=128, dtype="bfloat16")


def _heads(
    length: int, num_heads: int, kv_heads: int, dims: int, value_dims: int | None = None
) -> tuple[jax.Array, ...]:
    shapes = [(2, num_heads, length, dims), (2, kv_heads, length, dims), (2, kv_heads, length, value_dims or dims)]
    query, key, value = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    return query * dims**-0.5, key, value


@pytest.mark.parametrize(
    ("length", "num_heads", "kv_heads", "dims", "options", "segmented"),
    [
        (256, 4, 2, 64, {"logit_cap": 5.0}, True),
        (640, 2, 1, 80, {"window": 100}, True),  # five blocks: backward in two kernels
        (1152, 1, 1, 64, {}, True),  # nine blocks: backward in one kernel, over three blocks of keys at a time
        (128, 2, 2, 64, {"causal": False}, False),
        (128, 4, 2, 64, {"value_dims": 40, "sinks": jnp.array([0.0, 1.0, -1.0, 2.0])}, True),
    ],
)
def test_splash_equals_the_masked_softmax(length, num_heads, kv_heads, dims, options, segmented):
    """Values and gradients; the kernel is interpreted."""
    options = dict(options)
    heads, sinks = (
        _heads(length, num_heads, kv_heads, dims, options.pop("value_dims", None)),
        options.pop("sinks", None),
    )
    segments = jnp.where(jnp.arange(length) < jnp.array([[length // 3], [length]]), 1, 2) if segmented else None
    mask = jnp.ones((2, length, length), bool) if segments is None else segments[:, :, None] == segments[:, None]
    mask = jnp.tril(mask) if options.get("causal", True) else mask
    mask = jnp.triu(mask, 1 - options.get("window", length))

    def kernel(sinks, *heads):
        demand = Demand.of(heads[0], heads[2], **options)
        operands = Operands(*heads, segments, sinks=sinks)
        context = SplashAttention(interpret=True).attend_on_device(operands, demand)
        return jnp.sum(jnp.sin(context)), context

    def plain(sinks, *heads):
        context = dot_product_attention(*heads, mask, options.get("logit_cap"), sinks=sinks)
        return jnp.sum(jnp.sin(context)), context

    given = (1, 2, 3) if sinks is None else (0, 1, 2, 3)
    found, expected = (jax.jit(jax.grad(f, given, has_aux=True))(sinks, *heads) for f in (kernel, plain))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32)


def test_the_devices_choose_the_kernel():
    assert choose("auto", DEMAND, "tpu") == (BACKENDS["splash"], None)
    assert choose("auto", dataclasses.replace(DEMAND, length_parts=2), "tpu") == (BACKENDS["splash"], None)
    assert choose("auto", DEMAND, "gpu", "9.0") == (BACKENDS["cudnn"], None)
    assert choose("auto", DEMAND, "cpu") == (BACKENDS["xla"], None)
    assert choose("xla", DEMAND, "tpu") == (BACKENDS["xla"], None)


@pytest.mark.parametrize(
    ("platform", "demand", "reason"),
    [
        ("tpu", Demand(1000, 128, "bfloat16"), "1000"),
        ("tpu", Demand(256, 128, "bfloat16", biased=True), "bias"),
        ("tpu", Demand(256, 128, "bfloat16", length_parts=4), "on a device, 64"),
        ("gpu", Demand(256, 128, "bfloat16", length_parts=2), "2 devices"),
        ("gpu", Demand(256, 128, "bfloat16", value_dims_per_head=64), "Hopper"),
        ("gpu", Demand(256, 128, "bfloat16", sinks=True), "sinks"),
        ("gpu", Demand(256, 128, "bfloat16", logit_cap=50.0), "soft cap"),
        ("gpu", Demand(256, 128, "float32"), "fprop_dtype"),
        ("gpu", Demand(256, 256, "bfloat16"), "above 128"),
        ("gpu", Demand(255, 64, "bfloat16"), "odd"),
    ],
)
def test_what_the_kernel_cannot_do_runs_on_xla_or_is_refused(platform, demand, reason):
    backend, why = choose("auto", demand, platform, "8.0")
    assert backend is BACKENDS["xla"] and reason in why
    with pytest.raises(ConfigError, match=reason):
        choose("splash" if platform == "tpu" else "cudnn", demand, platform, "8.0")


class MeanAttention(AttentionBackend):
    """A backend of one's own: every position gets the mean of all values."""

    name = "mean"

    def attend(self, operands, demand):
        mean = jnp.mean(operands.value, axis=(1, 2), keepdims=True)
        return jnp.broadcast_to(mean, (*operands.query.shape[:3], operands.value.shape[3]))


def test_another_backend_is_one_class(monkeypatch):
    attention = Attention(model_dims=8, num_heads=2, dims_per_head=4)
    x, ids = jax.random.normal(jax.random.key(1), (1, 6, 8)), jnp.ones((1, 6), jnp.int32)
    params = jax.jit(attention.init)(jax.random.key(0), x, ids, ids)
    monkeypatch.setattr(attention_module, "choose_on_mesh", lambda *_: MeanAttention())
    found, _ = jax.jit(attention.apply)(params, x, ids, ids)
    np.testing.assert_allclose(found, jnp.broadcast_to(found[:, :1], found.shape), **FLOAT32)


def test_a_kernel_of_other_devices_is_refused():
    attention = Attention(model_dims=8, num_heads=2, dims_per_head=4, kernel="splash")
    ids = jnp.ones((1, 128), jnp.int32)
    x = jnp.ones((1, 128, 8))
    params = jax.jit(attention.init)(jax.random.key(0), x, ids, ids)
    with pytest.raises(ConfigError, match="runs on TPUs, and the devices of the mesh are CPUs"):
        attention.apply(params, x, ids, ids)
    cross = CrossAttention(model_dims=8, num_heads=2, dims_per_head=4, kernel="cudnn")
    with pytest.raises(ConfigError, match="no kernel `cudnn`"):
        cross.init(jax.random.key(0), x, ids, x, ids)


def test_policies_keep_what_the_kernel_computes(monkeypatch):
    """One context and its log-sum-exp, so that the backward pass does not run the forward kernel again."""
    monkeypatch.setattr(attention_module, "choose_on_mesh", lambda *_: SplashAttention(interpret=True))
    attention = Attention(model_dims=8, num_heads=2, dims_per_head=4)
    ids, x = jnp.ones((1, 128), jnp.int32), jnp.ones((1, 128, 8))
    params = jax.jit(attention.init)(jax.random.key(0), x, ids, ids)

    def saved(policy):
        loss = jax.checkpoint(lambda x: jnp.sum(attention.apply(params, x, ids, ids)[0]), policy=saveable(policy))
        shapes = [aval.shape for aval, _ in saved_residuals(loss, x)]
        return [shapes.count(shape) for shape in ((1, 2, 128, 4), (1, 2, 128))]

    assert saved("nothing") == [0, 0]
    assert saved("context") == [1, 1]
    assert saved("qkv_context_out_proj") == [4, 1]


@pytest.mark.parametrize("segmented", [True, False])
def test_cudnn_gets_what_it_takes(monkeypatch, segmented):
    """The program for a GPU, made without one: its calls forward and backward, and a mask only for segments."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    heads = [jax.ShapeDtypeStruct((2, n, 256, 64), jnp.bfloat16) for n in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32) if segmented else None

    def loss(query, key, value, ids):
        demand = Demand.of(query, value, window=100)
        context = CudnnAttention().attend_on_device(Operands(query, key, value, ids), demand)
        return context.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = gradient.trace(*heads, ids).lower(lowering_platforms=("cuda",)).as_text()
    name = "__cudnn$fmhaScaleBiasSoftmax" if segmented else "__cudnn$fmhaSoftmax"
    assert text.count(f"@{name}(") == text.count(f"@{name}Backward(") == 1
    assert '"sliding_window_length": 100' in text.replace("\\22", '"')


def test_a_kernel_computes_chunks(monkeypatch):
    attention = Attention(model_dims=8, num_heads=2, dims_per_head=4, window=48, chunked=True)
    x, ids = jax.random.normal(jax.random.key(0), (1, 128, 8)), jnp.where(jnp.arange(128) < 70, 1, 2)[None]
    positions = jnp.where(ids == 1, jnp.arange(128), jnp.arange(128) - 70)
    params = jax.jit(attention.init)(jax.random.key(0), x, ids, positions)
    expected, _ = jax.jit(attention.apply)(params, x, ids, positions)
    monkeypatch.setattr(attention_module, "choose_on_mesh", lambda *_: SplashAttention(interpret=True))
    found, _ = jax.jit(attention.apply)(params, x, ids, positions)
    np.testing.assert_allclose(found, expected, **FLOAT32)


def test_segments_can_be_ignored():
    """The whole row is seen, as by attention to one segment."""
    attention = Attention(model_dims=8, num_heads=2, dims_per_head=4, segmented=False)
    x, ids = jax.random.normal(jax.random.key(0), (1, 12, 8)), jnp.repeat(jnp.array([[1, 2]]), 6, axis=1)
    params = jax.jit(attention.init)(jax.random.key(0), x, ids, ids)
    whole = jax.jit(attention.clone(segmented=True).apply)(params, x, jnp.ones_like(ids), ids)[0]
    np.testing.assert_array_equal(jax.jit(attention.apply)(params, x, ids, ids)[0], whole)
    with pytest.raises(ConfigError, match="padding"):
        attention.clone(causal=False).init(jax.random.key(0), x, ids, ids)


def test_on_eight_devices():
    """Rows and heads over the mesh, few key/value heads, and stages of a pipeline, in a process of their own."""
    command = [sys.executable, "-m", "tests.layers.eight_devices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.tpu
@pytest.mark.slow
def test_a_stack_compiles_for_tpus(monkeypatch):
    """On a CPU host, rows and heads sharded: one kernel forward, one backward, none run again."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
    widths = dict(num_layers=2, model_dims=128, hidden_dims=128, num_heads=4, dims_per_head=64, num_kv_heads=2)
    stack = Stack(**widths, remat_policy="context")
    ids = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    x = jax.ShapeDtypeStruct((4, 256, 128), jnp.float32)

    def gradient(params, x, ids):
        return jax.grad(lambda p: stack.apply({"params": p}, x, None, ids, ids)[0].sum())(params)

    params = nn.meta.unbox(jax.eval_shape(stack.init, jax.random.key(0), x, None, ids, ids)["params"])
    with use_mesh(build_mesh(Mesh({"fsdp": 2, "tensor": 2}), topology.devices)) as mesh:
        whole = NamedSharding(mesh, PartitionSpec())
        program = jax.jit(gradient, in_shardings=whole).lower(params, x, ids).compile().as_text()
    calls = [line for line in program.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert sorted(re.findall(r"splash_mha_(fwd|dkv)", "".join(line.split("=")[0] for line in calls))) == ["dkv", "fwd"]
