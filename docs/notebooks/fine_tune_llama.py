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
# # Import a Llama, fine-tune it, chat, export it
#
# From weights in Hugging Face's format to a fine-tuned model in the same format. To run without a download, the
# notebook makes a small Llama of its own; with a directory of real weights, the steps are the same.
# [Fine-tuning](../fine-tuning.md) describes the settings.

# %%
import json
import pathlib

import paxcli as pax

tiny_llama = {
    "model.vocab_size": 259,
    "num_layers": 2,
    "num_train_steps": 2,
    "train_input": "StdlibInput",
    "eval_inputs": [],
    "global_batch_size": 2,
    "max_seq_len": 64,
}
made = pax.train(pax.load("llama-1b", overlays="cpu", set=tiny_llama), run_dir="runs/made")
pax.export_weights(made, "small-llama")
sorted(path.name for path in pathlib.Path("small-llama").iterdir())

# %% [markdown]
# ## Import
#
# The import reads `config.json` and safetensors, and writes a run at step 0 with a recipe of the same model.

# %%
pax.import_weights("small-llama", "runs/base")
base = pax.Run("runs/base")
print(base.step(), f"{base.recipe.sizes()['parameters']:,} parameters")

# %% [markdown]
# ## Conversations
#
# Each line is a conversation. Only the tokens of the assistant have loss.

# %%
rows = [{"prompt": f"What is {a} + {b}?", "response": f"It is {a + b}."} for a in range(1, 10) for b in range(1, 10)]
pathlib.Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
data = {
    "train_input.files": ["sums.jsonl"],
    "global_batch_size": 4,
    "num_train_steps": 20,
    "summary_interval_steps": 10,
    "eval_inputs": [],
    "learning_rate": 0.01,
}
recipe = pax.load("runs/base/recipe.yaml", overlays=["sft", "lora"], set=data)
(found,) = pax.inspect_input(recipe).inputs
print(f"{found.batches[0]['weights'].sum() / found.batches[0]['weights'].size:.0%} of the tokens have loss")

# %% [markdown]
# ## LoRA
#
# `init_from` takes the parameters of the imported run. Only the low-rank adapters are trained.

# %%
run = pax.train(recipe, run_dir="runs/sft", init_from="runs/base")
run.plot(metrics=["loss"])

# %% [markdown]
# ## Generate
#
# This model has learned next to nothing, but the steps are those of a real one.

# %%
for generation in run.generate(["What is 2 + 2?"], max_tokens=12):
    print(repr(generation.text), generation.finish_reason)

# %% [markdown]
# ## Export
#
# The adapters are merged into the weights; with `adapter=True` only they are written, as PEFT's files.

# %%
pax.export_weights(run, "small-llama-sft")
pax.export_weights(run, "small-llama-adapter", adapter=True)
sorted(str(path) for path in pathlib.Path().glob("small-llama-*/*"))
