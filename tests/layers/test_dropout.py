"""Dropout of blocks against Flax's, and against a NumPy formula with the mask."""

from __future__ import annotations

import functools
from typing import Any

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxcli.errors import ConfigError
from paxcli.layers.activations import dropout, identity
from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.backend import Demand
from paxcli.layers.attention.kernels import choose
from paxcli.layers.block import ParallelBlock, TransformerBlock
from paxcli.layers.decoder import DecoderBlock
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.moe_feed_forward import MoeFeedForward
from paxcli.layers.stack import Stack
from paxcli.models.language_model import LanguageModel
from paxcli.nested_map import NestedMap
from tests.tolerances import FLOAT32

WIDTHS = dict(model_dims=16, hidden_dims=32, num_heads=2, dims_per_head=8)
X = jax.random.normal(jax.random.key(0), (2, 6, 16))
ROWS = jnp.ones((2, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (2, 6))
FIELDS = ("residual_dropout_prob", "relu_dropout_prob", "atten_dropout_prob", "input_dropout_prob")


class _Drops(nn.Module):
    rate: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return dropout(self, self.rate)(x)


def key(seed: int) -> dict[str, jax.Array]:
    return {"dropout": jax.random.key(seed)}


def params_of(layer: nn.Module, *inputs: Any) -> Any:
    return nn.meta.unbox(jax.jit(layer.init)(jax.random.key(1), *inputs))


def test_it_drops_what_flax_drops() -> None:
    x = jax.random.normal(jax.random.key(3), (200, 300))
    found = _Drops(0.3).apply({}, x, rngs=key(5))
    np.testing.assert_array_equal(found, nn.Dropout(0.3, deterministic=False).apply({}, x, rngs=key(5)))
    assert abs(np.mean(np.asarray(found) == 0) - 0.3) < 0.01
    np.testing.assert_allclose(np.mean(found - x), 0, atol=0.02)
    assert found.dtype == x.dtype and _Drops(0.3).apply({}, x.astype(jnp.bfloat16), rngs=key(5)).dtype == jnp.bfloat16


def test_it_is_off_in_evaluation_and_by_default() -> None:
    np.testing.assert_array_equal(_Drops(0.3).apply({}, X), X)
    np.testing.assert_array_equal(_Drops(0.0).apply({}, X, rngs=key(5)), X)
    config = LanguageModel.config()
    assert all(getattr(at, name) == 0 for at, name in zip(places(config), FIELDS, strict=True))


def places(config: Any) -> tuple[Any, ...]:
    """Where a model has each of `FIELDS`."""
    block = config.stack.block
    return block, block.feed_forward, block.attention, config


def test_the_feed_forward_drops_what_its_second_matrix_reads() -> None:
    layer = FeedForward(model_dims=16, hidden_dims=32, activation="relu", relu_dropout_prob=0.5, use_bias=False)
    variables = params_of(layer, X)
    w = {name: np.asarray(x) for name, x in variables["params"].items()}
    y = layer.apply(variables, X, rngs=key(7))
    # With an identity of the right shape in place of `w_out`, the output is the hidden activations.
    hidden = FeedForward(model_dims=32, hidden_dims=32, activation="relu", relu_dropout_prob=0.5, use_bias=False)
    opened = {"params": {"w_in": jnp.pad(w["w_in"], ((0, 16), (0, 0))), "w_out": jnp.eye(32)}}
    kept = hidden.apply(opened, jnp.pad(X, ((0, 0), (0, 0), (0, 16))), rngs=key(7)) != 0
    full = np.maximum(np.asarray(X) @ w["w_in"], 0)
    assert 0.4 < np.mean(kept[full > 0]) < 0.6
    np.testing.assert_allclose(y, (2 * kept * full) @ w["w_out"].T, **FLOAT32)


@pytest.mark.parametrize(
    "fields", [{}, {"num_kv_heads": 1, "window": 3}, {"causal": False}, {"bidirectional_prefix": True}]
)
def test_attention_drops_probabilities(fields: dict[str, Any]) -> None:
    """Values that are one-hot by position make the context the probabilities themselves."""
    x = jnp.broadcast_to(jnp.eye(6), (2, 6, 6))
    layer = Attention(model_dims=6, num_heads=2, dims_per_head=6, atten_dropout_prob=0.5, **fields)
    params = dict(params_of(layer, x, *ROWS)["params"])
    heads = params["value"].shape[1]
    params["value"] = jnp.broadcast_to(jnp.eye(6)[:, None], (6, heads, 6))
    params["post"] = jnp.stack([jnp.eye(6), jnp.zeros((6, 6))])  # head 0 alone
    apply = functools.partial(layer.apply, {"params": params}, x, *ROWS)
    full, found = (np.asarray(apply(**options)[0]) for options in ({}, {"rngs": key(2)}))
    np.testing.assert_allclose(full.sum(axis=-1), 1, rtol=1e-5)
    ratio = found[full > 1e-6] / full[full > 1e-6]
    is_dropped = ratio == 0
    np.testing.assert_allclose(ratio[~is_dropped], 2, rtol=1e-4)
    assert 0.2 < np.mean(is_dropped) < 0.8


def test_kernels_that_have_no_probabilities_are_left_or_refused_by_name() -> None:
    demand = Demand(256, 128, "bfloat16", drop=lambda x: x)
    for name, platform in (("splash", "tpu"), ("cudnn", "gpu")):
        backend, reason = choose("auto", demand, platform, "9.0")
        assert backend.name == "xla" and "no dropout of attention probabilities" in str(reason)
        with pytest.raises(ConfigError, match=f"attention.kernel={name}: it has no dropout"):
            choose(name, demand, platform, "9.0")  # type: ignore[arg-type]
    assert choose("splash", Demand(256, 128, "bfloat16", drop=identity), "tpu")[0].name == "splash"


@pytest.mark.parametrize("kind", ["pre", "post", "parallel", "experts", "decoder"])
def test_blocks_drop_each_branch_before_it_is_added(kind: str) -> None:
    """With a rate near 1 almost nothing is left of the branches; what is left is multiplied by 1 / (1 - rate)."""
    cls = {"parallel": ParallelBlock, "decoder": DecoderBlock}.get(kind, TransformerBlock)
    fields: dict[str, Any] = {"post_norms": kind == "post"}
    if kind == "experts":
        fields["feed_forward"] = functools.partial(MoeFeedForward, num_experts=2, num_experts_per_token=1)
    source = (X, ROWS[0]) if kind == "decoder" else ()
    block = cls(**WIDTHS, **fields)
    variables = params_of(block, X, None, *ROWS, *source)
    full = block.apply(variables, X, None, *ROWS, *source)[0] - X
    dropped = block.clone(residual_dropout_prob=0.999)
    apply = jax.jit(lambda key: dropped.apply(variables, X, None, *ROWS, *source, rngs={"dropout": key})[0] - X)
    outs = np.stack([apply(jax.random.key(seed)) for seed in range(20)])
    branches = 3 if kind == "decoder" else 2
    assert np.mean(outs == 0) > 1 - 3 * branches * 0.001
    assert np.abs(outs).max() > 20 * float(jnp.abs(full).mean())
    np.testing.assert_array_equal(dropped.apply(variables, X, None, *ROWS, *source)[0] - X, full)


@pytest.mark.parametrize("scan", [True, False])
def test_the_backward_pass_recomputes_the_same_masks(scan: bool) -> None:
    block = TransformerBlock.partial(residual_dropout_prob=0.3)
    block.feed_forward.relu_dropout_prob = 0.3
    block.attention.atten_dropout_prob = 0.3
    stack = Stack(num_layers=2, **WIDTHS, block=fdl.build(block), scan=scan, remat_policy="everything")
    variables = params_of(stack, X, None, *ROWS)

    def gradients(policy: str) -> Any:
        def loss(variables: Any) -> jax.Array:
            y = stack.clone(remat_policy=policy).apply(variables, X, None, *ROWS, rngs=key(4))[0]
            return jnp.sum(jnp.sin(y))

        return jax.jit(jax.grad(loss))(variables)

    expected = gradients("everything")
    for policy in ("nothing", "dots_with_no_batch_dims"):
        for one, other in zip(jax.tree.leaves(gradients(policy)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_changes_the_training_loss_alone(field: str) -> None:
    config = LanguageModel.config(
        vocab_size=31, max_seq_len=6, model_dims=16, hidden_dims=32, num_layers=2, num_heads=2, loss_chunk=None
    )
    plain = fdl.build(config)
    setattr(places(config)[FIELDS.index(field)], field, 0.5)
    model = fdl.build(config)
    ids = jax.random.randint(jax.random.key(5), (2, 6), 0, 31)
    batch = NestedMap(ids=ids, labels=ids, weights=jnp.ones((2, 6)), segment_ids=ROWS[0], segment_pos=ROWS[1])
    params = params_of(plain, batch)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(params_of(model, batch)["params"])

    def loss(model: LanguageModel, seed: int | None) -> float:
        rng = None if seed is None else jax.random.key(seed)
        return float(jax.jit(model.loss_and_metrics)(params, batch, rng)[0]["loss"][0])

    assert loss(model, None) == loss(plain, None) == loss(plain, 1)
    assert loss(model, 1) == loss(model, 1) != loss(model, 2)
