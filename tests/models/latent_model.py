"""A user's file, copied by test_contract.py: an attention with a latent cache, in a language model of pax's own parts.

Multi-head latent attention (MLA: DeepSeek-AI, 2024), without RoPE: keys and values are expanded from a low-rank latent
[B, T, R], which alone is cached. Queries and keys have H features a head, values Hv.
"""

from __future__ import annotations

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp

from pax_recipes.tiny import tiny
from paxcli.config.recipe import recipe
from paxcli.layers.attention.xla import dot_product_attention, is_visible
from paxcli.layers.base import CachedLayer
from paxcli.layers.flops import Flops, matrix_flops, visible_pairs
from paxcli.layers.init import Init, Xavier
from paxcli.layers.positions import SinusoidPositions
from paxcli.training.experiment import Experiment


class LatentAttention(CachedLayer):
    """Causal attention whose keys and values are expanded from a cached latent of `latent_dims` (R) features."""

    model_dims: int
    num_heads: int
    dims_per_head: int
    num_kv_heads: int | None = None
    params_init: Init = Xavier()
    latent_dims: int = 8
    value_dims: int = 12

    def setup(self) -> None:
        dims, heads, latent, init = self.model_dims, self.num_heads, self.latent_dims, self.params_init
        in_heads, widen = ("embed", "heads", "head_dim"), init.weight((0,), (1, 2))
        self.query = self.weight("query", widen, (dims, heads, self.dims_per_head), in_heads)
        self.down = self.weight("down", init.weight((0,), (1,)), (dims, latent), ("embed", None))
        self.up_key = self.weight("up_key", widen, (latent, heads, self.dims_per_head), (None, *in_heads[1:]))
        self.up_value = self.weight("up_value", widen, (latent, heads, self.value_dims), (None, *in_heads[1:]))
        narrow = init.weight((0, 1), (2,))
        self.post = self.weight("post", narrow, (heads, self.value_dims, dims), ("heads", "head_dim", "embed"))

    def __call__(self, x, segment_ids, segment_pos, cache=None):
        query = jnp.einsum("btd,dnh->bnth", x, self.query) * self.dims_per_head**-0.5
        latent = jnp.einsum("btd,dr->btr", x, self.down)
        if cache is None:
            distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
            visible = is_visible(distance, None) & (segment_ids[:, :, None] == segment_ids[:, None, :])
        else:
            write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (at, 0)))
            cache = latent = write(cache, latent, segment_pos[:, 0])
            visible = is_visible(segment_pos[:, :, None] - jnp.arange(latent.shape[1]), None)
        key = jnp.einsum("bsr,rnh->bnsh", latent, self.up_key)
        value = jnp.einsum("bsr,rnh->bnsh", latent, self.up_value)
        context = dot_product_attention(query, key, value, visible)
        return jnp.einsum("bnth,nhd->btd", context, self.post), cache

    @nn.nowrap
    def matmul_flops(self, *shape: int) -> Flops:
        batch, length = shape
        heads, both = self.num_heads, self.dims_per_head + self.value_dims
        matrices = (self.model_dims * heads + self.latent_dims * heads) * both + self.model_dims * self.latent_dims
        pairs = batch * visible_pairs(length, causal=True)
        return matrix_flops(shape, matrices) + Flops(attention=2 * pairs * heads * both)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, dtype) -> jax.Array:
        return jnp.zeros((batch_size, length, self.latent_dims), dtype)


@recipe()
def latent() -> fdl.Config[Experiment]:
    """`tiny`, smaller, with latent attention."""
    config = tiny()
    model, train = config.task.model, config.task.train
    model.max_seq_len, model.model_dims, model.hidden_dims, model.num_layers = 64, 64, 128, 2
    model.position = SinusoidPositions.partial()
    model.stack.block.attention = LatentAttention.partial()
    train.num_train_steps, train.eval_interval_steps, train.summary_interval_steps = 30, None, 10
    config.eval_inputs = []
    config.mesh.peak_tflops = 0.1
    return config
