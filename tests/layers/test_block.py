"""A block with a norm after the feed-forward only."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from paxcli.layers.block import TransformerBlock
from paxcli.layers.rms_norm import RmsNorm
from tests.tolerances import FLOAT32


def test_a_norm_after_the_feed_forward_alone() -> None:
    """The block without it adds the same feed-forward, not normed; without a feed-forward, both add attention alone."""
    widths = {"model_dims": 16, "hidden_dims": 32, "num_heads": 2, "dims_per_head": 8}
    norm = functools.partial(RmsNorm, direct_scale=True)
    plain = TransformerBlock(**widths, norm=norm)
    normed = TransformerBlock(**widths, norm=norm, post_norms="feed_forward")
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    rest = None, jnp.ones((2, 6), jnp.int32), jnp.broadcast_to(jnp.arange(6), (2, 6))
    params = nn.meta.unbox(jax.jit(plain.init)(jax.random.key(1), x, *rest))["params"]
    with_norm = nn.meta.unbox(jax.jit(normed.init)(jax.random.key(1), x, *rest))["params"]
    assert with_norm.keys() - params.keys() == {"feed_forward_post_norm"}

    scale = jnp.linspace(0.5, 2.0, 16)
    y, _ = jax.jit(plain.apply)({"params": params}, x, *rest)
    found, _ = jax.jit(normed.apply)({"params": {**params, "feed_forward_post_norm": {"scale": scale}}}, x, *rest)
    closed = {**params, "feed_forward": jax.tree.map(jnp.zeros_like, params["feed_forward"])}
    attended, _ = jax.jit(plain.apply)({"params": closed}, x, *rest)
    fed = np.asarray(y - attended)
    expected = attended + fed / np.sqrt(np.mean(fed**2, axis=-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(found, expected, **FLOAT32)
