"""What layers count, against what XLA counts for their forward passes and against masks."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from paxcli.layers.attention.attention import Attention
from paxcli.layers.attention.cross_attention import CrossAttention
from paxcli.layers.attention.latent_attention import LatentAttention
from paxcli.layers.base import flops_of
from paxcli.layers.block import ParallelBlock, TransformerBlock
from paxcli.layers.decoder import Decoder
from paxcli.layers.feed_forward import FeedForward
from paxcli.layers.flops import Flops, visible_pairs
from paxcli.layers.mlp import Mlp
from paxcli.layers.stack import Encoder, Stack
from paxcli.layers.vision_transformer import VisionTransformer

B, T, S, D = 2, 64, 48, 128
WIDTHS = dict(model_dims=D, hidden_dims=512, num_heads=4, dims_per_head=64, num_kv_heads=2)
HEADS = {name: WIDTHS[name] for name in ("model_dims", "num_heads", "dims_per_head", "num_kv_heads")}
LATENT = dict(model_dims=D, num_heads=4, dims_per_head=64, latent_dims=96, query_latent_dims=64, rotary_dims=16)
UNROLLED = dict(num_layers=2, scan=False, remat_policy="everything")


def _ones(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _features(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, SOURCE, IDS, SOURCE_IDS = _features(B, T, D), _features(B, S, D), _ones(B, T), _ones(B, S)


@pytest.mark.parametrize(
    ("layer", "inputs", "shape"),
    [
        (Attention(**HEADS, causal=False), (X, IDS, IDS), (B, T)),
        (Attention(**HEADS, causal=False, value_dims_per_head=32), (X, IDS, IDS), (B, T)),
        (LatentAttention(**LATENT), (X, IDS, IDS), (B, T)),
        (CrossAttention(**HEADS), (X, IDS, SOURCE, SOURCE_IDS), (B, T, S)),
        (FeedForward(model_dims=D, hidden_dims=512, gated=True), (X,), (B, T)),
        (Encoder(**WIDTHS, **UNROLLED), (X, None, IDS, IDS), (B, T)),
        (Decoder(**WIDTHS, **UNROLLED), (X, None, IDS, IDS, SOURCE, SOURCE_IDS), (B, T, S)),
        (Mlp(input_dims=D, output_dims=10, hidden_dims=256), (X,), (B, T)),
        (
            VisionTransformer(
                output_dims=10,
                image_size=32,
                patch_size=4,
                model_dims=D,
                hidden_dims=512,
                num_layers=2,
                num_heads=2,
                stack=functools.partial(Encoder, scan=False, remat_policy="everything"),
            ),
            (_features(B, 32, 32, 3),),
            (B, 32, 32),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_count_what_xla_counts(layer, inputs, shape):
    """XLA also counts norms, softmax and activations: a few percent at these sizes."""
    params = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
    counted = jax.jit(layer.apply).lower(params, *inputs).cost_analysis()["flops"]
    ours = layer.matmul_flops(*shape)
    if isinstance(layer, Decoder):  # so short a row is one block: XLA computes the masked half of self-attention too
        ours += Flops(attention=2 * 2 * B * T**2 / 2 * 4 * 2 * 64)
    if isinstance(layer, LatentAttention):  # likewise; its values have 48 features
        ours += Flops(attention=2 * B * T**2 / 2 * 4 * (64 + 48))
    assert ours.total < counted < 1.05 * ours.total


def test_pairs_are_those_of_a_mask():
    length, window = 512, 128
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    for reach in (window, length):
        pairs = float(jnp.sum((distance >= 0) & (distance < reach)))
        # The mask has all of the diagonal, the closed form half of it.
        assert visible_pairs(length, True, reach) == pytest.approx(pairs, rel=5e-3)
    for reach in (100, 600):
        pairs = float(jnp.sum((distance >= 0) & (distance <= jnp.arange(length)[:, None] % reach)))
        assert visible_pairs(length, True, reach, chunked=True) == pytest.approx(pairs, rel=2e-2)
    assert visible_pairs(length, True, 4096) == visible_pairs(length, True) == length**2 / 2
    assert visible_pairs(length, False) == length**2


class PlainBlock(nn.Module):
    """A user's own block, which does not declare its FLOPs."""

    model_dims: int
    hidden_dims: int
    num_heads: int
    dims_per_head: int
    num_kv_heads: int | None
    params_init: object

    @nn.compact
    def __call__(self, x, cache, segment_ids, segment_pos):
        return x + nn.Dense(self.model_dims)(x), cache


class PlainFeedForward(nn.Module):
    """Likewise."""

    model_dims: int
    hidden_dims: int
    params_init: object


class WiderBlock(TransformerBlock):
    """A block with one more matmul than it inherits."""

    def __call__(self, x, cache, segment_ids, segment_pos):
        x, cache = super().__call__(x, cache, segment_ids, segment_pos)
        return x @ jnp.ones((self.model_dims, self.model_dims)), cache


def test_an_unknown_layer_makes_the_sum_unknown():
    assert Stack(**WIDTHS, num_layers=2).matmul_flops(B, T) is not None
    assert Stack(**WIDTHS, num_layers=2, block=functools.partial(PlainBlock)).matmul_flops(B, T) is None
    assert Stack(**WIDTHS, num_layers=2, block=functools.partial(WiderBlock)).matmul_flops(B, T) is None
    parallel = Stack(**WIDTHS, num_layers=2, block=functools.partial(ParallelBlock))
    assert flops_of(parallel, B, T) == Stack(**WIDTHS, num_layers=2).matmul_flops(B, T)
    assert TransformerBlock(**WIDTHS, feed_forward=functools.partial(PlainFeedForward)).matmul_flops(B, T) is None
