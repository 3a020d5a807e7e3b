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
# # Predict a TPU step and find the fastest mesh
#
# The TPU compiler runs without a TPU: on Linux for x86-64, with `pip install 'jax[tpu]'`. It reports whether a step fits
# in memory, and pax predicts how long the step takes. [Compiling ahead of time](../compile.md) describes how.
# The model here is very small, so that each compilation takes seconds.

# %%
import paxcli as pax

small = {"num_layers": 1, "model_dims": 128, "hidden_dims": 256, "max_seq_len": 128}
small |= {"percore_batch_size": None, "global_batch_size": 32, "fprop_dtype": "bfloat16"}

# %% [markdown]
# ## One step
#
# Four TPU v5e chips, each with a copy of the model and a quarter of the batch:

# %%
recipe = pax.load("tiny-synthetic", set={**small, "ici_mesh_shape": {"data": 4}})
copies = pax.compile(recipe, topology="v5e-4").report
for name in ("fits", "hbm_needed_bytes", "hbm_available_bytes", "predicted_step_seconds", "predicted_mfu"):
    print(f"{name:<24}{copies[name]}")

# %% [markdown]
# The chips add up their gradients. `shares` divides the time of the step by kind of work, and how much of the communication is
# exposed: not hidden behind other work.

# %%
print(copies["collectives"])
copies["shares"]

# %% [markdown]
# ## The fastest mesh
#
# The same chips can shard the parameters (`fsdp`) or the matmuls (`tensor`) instead. Which is fastest depends on the model and
# the batch:

# %%
reports = {"data": copies}
for axis in ("fsdp", "tensor"):
    recipe = pax.load("tiny-synthetic", set={**small, "ici_mesh_shape": {axis: 4}})
    reports[axis] = pax.compile(recipe, topology="v5e-4").report
for axis, report in sorted(reports.items(), key=lambda item: item[1]["predicted_step_seconds"]):
    seconds, needed = report["predicted_step_seconds"], report["hbm_needed_bytes"]
    print(
        f"{axis}=4: {seconds * 1e6:6.0f} µs, {needed / 2**20:5.1f} MiB, {[one['kind'] for one in report['collectives']]}"
    )

# %% [markdown]
# `pax compile RECIPE --topology v5e-4 --search` continues from here: it compiles meshes, remat policies and batch sizes one
# after the other, and ranks them by predicted tokens per second.
