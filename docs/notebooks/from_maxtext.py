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
# # From a MaxText script to a training run
#
# Convert a launch script to a recipe, compare the sizes, and train a small version of it here.
# [From MaxText](../maxtext.md) describes the report, the dates and the weights.

# %%
import pathlib
import subprocess
import sys

import paxcli as pax

# %% [markdown]
# A launch script as it is found in MaxText's repository. It is parsed, and never run.

# %%
pathlib.Path("train.sh").write_text("""\
export LIBTPU_INIT_ARGS="--xla_enable_async_all_gather=true"
python3 MaxText/train.py MaxText/configs/base.yml run_name=mine model_name=gpt3-6b steps=100 \\
  ici_fsdp_parallelism=64 dcn_data_parallelism=2 per_device_batch_size=12 remat_policy=full dataset_type=synthetic
""")
command = [sys.executable, "-m", "paxcli", "maxtext-convert", "train.sh", "--date", "2024-10-01", "--out", "mine.yaml"]
done = subprocess.run(command, capture_output=True, text=True)
print(done.stderr[:2000])

# %% [markdown]
# The recipe is a YAML file. Comments name the key that each value comes from.

# %%
print(pathlib.Path("mine.yaml").read_text())

# %% [markdown]
# It loads as any other recipe, and computes how large the run would be: no device is started.

# %%
recipe = pax.load("mine.yaml")
recipe.sizes()

# %% [markdown]
# The overlay `cpu` makes it small enough for this machine: the same architecture, with other sizes.

# %%
here = pax.load("mine.yaml", overlays="cpu", set={"num_train_steps": 4, "summary_interval_steps": 2})
run = pax.train(here, run_dir="runs/mine")
run.result["loss"]
