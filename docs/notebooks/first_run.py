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
# # A first run
#
# Train `tiny`, a language model over bytes, for 20 steps; look at its curves; evaluate it; generate text.
# It learns from the standard library's sources, so nothing is downloaded. Two CPU cores take about a minute.

# %%
import paxcli as pax

# %% [markdown]
# A recipe holds every setting of a run. `set` changes values; printing the recipe shows each value and its origin.

# %%
recipe = pax.load("tiny", set={"num_train_steps": 20, "summary_interval_steps": 5, "max_seq_len": 128})
recipe.sizes()

# %%
(found,) = pax.inspect_input(recipe).inputs
print(found.batches[0]["ids"].shape, found.rows[0][0]["ids"][0][:60])

# %% [markdown]
# Progress is printed below the cell. The stop button saves a checkpoint; running the cell again resumes.

# %%
run = pax.train(recipe, run_dir="runs/first")

# %%
run.metrics()["loss"]

# %%
run.plot(metrics=["loss"])

# %%
run.evaluate()

# %%
for generation in run.generate(["def ", "import "], max_tokens=20, temperature=0.8):
    print(repr(generation.prompt + generation.text))
