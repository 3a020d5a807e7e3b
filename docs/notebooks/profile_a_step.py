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
# # Profile a step and read it
#
# Trace a few steps of a run and see where their time went. [Profiling](../profiling.md) describes each part.

# %%
import json
import pathlib
import subprocess
import sys

import paxcli as pax

# %% [markdown]
# Steps 6 to 8 are traced; the first ones are slower, since the step is compiled and caches are cold.

# %%
small = {"num_train_steps": 10, "summary_interval_steps": 5, "max_seq_len": 64, "eval_inputs": []}
recipe = pax.load("tiny", overlays="cpu", set=small)
run = pax.train(recipe, run_dir="runs/traced", profile_steps="6:8")

# %% [markdown]
# The summary divides the time of the devices by kind of operation, by layer and by operation.

# %%
command = [sys.executable, "-m", "paxcli", "profile", "summarize", run.path]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# ## Reading it
#
# - `matmul` is the work that cannot be avoided. The rest of a well-tuned step is small beside it.
# - `other` is element-wise work, copies and the optimizer. A model this narrow has much of it.
# - `idle` is time in which the device waited for the host. The gaps list what the host did.
# - `collective` appears on several devices: exposed communication.
#
# The same as JSON, for a program that watches for regressions:

# %%
result = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
sorted(result)

# %% [markdown]
# The trace itself opens in xprof and TensorBoard; beside it is the HLO of the step, which attributes operations to layers.

# %%
sorted({path.suffix for path in pathlib.Path(run.path, "profile").rglob("*") if path.is_file()})

# %% [markdown]
# ## The time outside of steps
#
# A short run spends most of its time on starting and compiling. `goodput.json` has the accounts of all restarts.

# %%
goodput = json.loads(pathlib.Path(run.path, "goodput.json").read_text())
sorted(goodput)
