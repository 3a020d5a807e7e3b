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
# # From a Pax experiment class to a recipe
#
# Pax's experiments are classes with attributes in capitals. In pax they are functions that return a configuration.
# [Coming from Pax](../coming-from-pax.md) lists all classes and flags.

# %%
import pathlib

import paxcli as pax

# %% [markdown]
# ## Experiments that exist
#
# Pax's own experiments load under their class names, and their attributes can be set in capitals.

# %%
recipe = pax.load("C4Spmd1BAdam4Replicas", set={"PERCORE_BATCH_SIZE": 16, "NUM_LAYERS": 12})
recipe.name, recipe.pax_name, recipe.sizes()

# %% [markdown]
# ## An experiment of your own
#
# Suppose this class is yours:
#
# ```python
# @experiment_registry.register
# class Mine(C4SpmdAdam):
#     NUM_LAYERS = 4
#     MODEL_DIMS = 512
#     HIDDEN_DIMS = 2048
#     NUM_HEADS = 8
#     PERCORE_BATCH_SIZE = 4
#     LEARNING_RATE = 1e-3
#     ICI_MESH_SHAPE = [1, 8, 1]
#
#     def task(self):
#         task_p = super().task()
#         task_p.train.num_train_steps = 5000
#         return task_p
# ```
#
# As a recipe: call the parent, then assign fields. A misspelt field is an error, where Pax ignored it.

# %%
pathlib.Path("mine.py").write_text('''\
"""My experiments."""

from pax_recipes.c4 import c4_1b
from paxcli.config.recipe import recipe


@recipe(pax_name="Mine")
def mine():
    """A small model on C4."""
    config = c4_1b()
    model, train = config.task.model, config.task.train
    model.num_layers = 4
    model.model_dims = 512
    model.hidden_dims = 2048
    model.num_heads = 8
    model.dims_per_head = 64
    train.percore_batch_size = 4
    train.learner.learning_rate = 1e-3
    train.num_train_steps = 5000
    config.mesh.ici_mesh_shape = [1, 8, 1]
    return config
''')
recipe = pax.load("./mine.py:mine")
recipe.sizes()

# %% [markdown]
# Every value has its origin beside it:

# %%
print("\n".join(str(recipe).splitlines()[:24]))

# %%
try:
    pax.load("./mine.py:mine", set={"HIDEN_DIMS": 1024})
except pax.ConfigError as error:
    print(error.message, error.hint)

# %% [markdown]
# ## Train it here
#
# The overlays make it small and replace C4 by synthetic rows.

# %%
small = pax.load("./mine.py:mine", overlays=["cpu", "synthetic-data"], set={"num_train_steps": 4})
run = pax.train(small, run_dir="runs/mine")
run.result["loss"]
