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
# # Pipelines and several slices
#
# Layers split into stages, and a mesh of two slices, on eight CPU devices. [Pipelines](../training.md#pipelines) lists the
# settings, and [Meshes and sharding](../meshes.md) has worked examples.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import paxcli as pax

small = {"num_layers": 4, "model_dims": 64, "hidden_dims": 128, "num_heads": 2, "max_seq_len": 32}
small |= {"global_batch_size": 32, "num_train_steps": 2, "summary_interval_steps": 1, "eval_inputs": []}

# %% [markdown]
# ## Two stages
#
# Each stage has two of the four layers. A batch is split into microbatches; while stage 1 computes one, stage 0 computes
# the next. On a mesh without the axis `stage`, each device computes all stages, one after another.

# %%
stages = {"stack": "PipelinedStack", "num_stages": 2, "stack.num_microbatches": 4}
meshes = {
    "one after another": {"mesh.ici_mesh_shape": {"fsdp": 8}},
    "pipelined": {"mesh.ici_mesh_shape": {"stage": 2, "fsdp": 4}},
}
runs = {}
for name, changes in meshes.items():
    runs[name] = pax.train(pax.load("tiny", set={**small, **stages, **changes}), run_dir=f"runs/{name}")

# %% [markdown]
# Both compute the same loss:

# %%
{name: round(run.result["loss"], 5) for name, run in runs.items()}

# %% [markdown]
# The parameters of a pipelined stack have a dimension for the stages, sharded over the mesh axis `stage`:

# %%
for path, array in jax.tree_util.tree_leaves_with_path(runs["pipelined"].params()):
    if "feed_forward" in str(path):
        print("/".join(str(key.key) for key in path), array.shape, array.sharding.spec)

# %% [markdown]
# ## The bubble
#
# A step takes the time of `rounds · microbatches + stages − 1` microbatches in one stage, and the last `stages − 1` of
# them wait. The share that waits, by the number of microbatches, for eight stages:

# %%
import matplotlib.pyplot as plt

counts = [8, 16, 32, 64, 128]
figure, axes = plt.subplots(figsize=(6, 3.2))
for rounds in (1, 2, 4):
    axes.plot(counts, [7 / (rounds * count + 7) for count in counts], marker="o", label=f"circular_repeat={rounds}")
axes.set(xscale="log", xlabel="microbatches", ylabel="share of a step that waits")
axes.set_xticks(counts, map(str, counts))
axes.legend()
plt.show()

# %% [markdown]
# ## Two slices
#
# `dcn_mesh_shape` arranges slices, `ici_mesh_shape` the devices of one; the mesh is their product. Data parallelism between
# slices exchanges gradients once a step. Without TPUs the devices form one slice, so the product is given directly here; on
# two slices it is `ici_mesh_shape={fsdp: 4}` with `dcn_mesh_shape={data: 2}`.

# %%
recipe = pax.load("tiny", set={**small, "mesh.ici_mesh_shape": {"data": 2, "fsdp": 4}})
run = pax.train(recipe, run_dir="runs/slices")
round(run.result["loss"], 5)
