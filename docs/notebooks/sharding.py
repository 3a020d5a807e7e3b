# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sharding by hand
#
# How arrays are sharded over a device mesh, on eight CPU devices: first with JAX alone, then as pax does it for a model.
# Nothing here needs an accelerator.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import paxcli as pax

len(jax.devices())

# %% [markdown]
# ## With JAX alone
#
# A mesh names the axes of a grid of devices. A `PartitionSpec` gives, for each dimension of an array, the mesh axis that
# shards it; None means that the dimension is not sharded. The picture shows which device has which part.

# %%
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
weight = jnp.zeros((256, 512))
jax.debug.visualize_array_sharding(jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))))

# %% [markdown]
# Without `tensor` in the spec, the two devices of each pair hold the same rows: the array is replicated over `tensor`.

# %%
jax.debug.visualize_array_sharding(jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp", None))))

# %% [markdown]
# A matmul of arrays with these shardings needs communication, which the compiler inserts. Rows of activations are
# sharded over `fsdp`, so the weight is gathered over `fsdp` before it is used.

# %%
rows = jax.device_put(jnp.zeros((64, 256)), NamedSharding(mesh, PartitionSpec("fsdp", None)))
sharded = jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
compiled = jax.jit(lambda x, w: x @ w).lower(rows, sharded).compile()
sorted({word.strip() for word in ("all-gather", "all-reduce", "reduce-scatter") if word in compiled.as_text()})

# %% [markdown]
# ## As pax does it
#
# A layer of pax never names mesh axes. It names what a dimension means: `embed`, `mlp`, `heads`, `vocab`. One table of
# rules maps these logical axes to mesh axes, so a recipe changes the parallelism with `ici_mesh_shape` alone.

# %%
small = {"num_layers": 2, "model_dims": 64, "hidden_dims": 128, "num_heads": 4, "max_seq_len": 32}
small |= {"global_batch_size": 8, "num_train_steps": 2, "eval_inputs": [], "summary_interval_steps": 1}
meshes = {"fsdp": {"fsdp": 8}, "fsdp-tensor": {"fsdp": 4, "tensor": 2}, "data": {"data": 8}}
runs = {}
for name, shape in meshes.items():
    recipe = pax.load("tiny", set={**small, "mesh.ici_mesh_shape": shape})
    runs[name] = pax.train(recipe, run_dir=f"runs/{name}")

# %% [markdown]
# The loss does not depend on the mesh, up to rounding.

# %%
{name: run.result["loss"] for name, run in runs.items()}

# %% [markdown]
# Every parameter of the run on 4 × 2 devices, its shape, and the mesh axes that shard it:

# %%
params = runs["fsdp-tensor"].params()
for path, array in jax.tree_util.tree_leaves_with_path(params):
    name = "/".join(str(key.key) for key in path)
    print(f"{name:55} {array.shape!s:20} {array.sharding.spec}")

# %% [markdown]
# The feed-forward layer's first weight is [layers, embed, mlp]. Here is that of layer 0: `embed` is sharded over `fsdp`,
# `mlp` over `tensor`.

# %%
(first,) = [array for path, array in jax.tree_util.tree_leaves_with_path(params) if "feed_forward" in str(path)][:1]
print(first.shape, first.sharding.spec, "each device holds", first.addressable_shards[0].data.shape)

# %% [markdown]
# What each device holds of the parameters, in bytes: an eighth with FSDP, everything with data parallelism.

# %%
for name, run in runs.items():
    leaves = jax.tree.leaves(run.params())
    print(f"{name:12} {sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves):,}")
