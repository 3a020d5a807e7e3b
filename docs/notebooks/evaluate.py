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
# # Evaluate
#
# What an evaluation reports, on which data, and how to compare checkpoints and models.
# [Evaluation](../training.md#evaluation) describes the settings.

# %%
import pathlib

import paxcli as pax

small = {"num_layers": 1, "model_dims": 64, "hidden_dims": 128, "num_heads": 2, "max_seq_len": 64}
small |= {"global_batch_size": 8, "num_train_steps": 60, "summary_interval_steps": 20}
small |= {"eval_interval_steps": 20, "save_interval_steps": 20}
small |= {"eval_inputs.0.reset_for_eval": False, "eval_inputs.0.eval_loop_num_batches": 4}
run = pax.train(pax.load("tiny", set=small), run_dir="runs/tiny")

# %% [markdown]
# The evaluations during training are metrics as well: the split `eval/` and the name of the input.

# %%
run.metrics("eval/stdlib")["log_pplx"]

# %% [markdown]
# ## One checkpoint
#
# `log_pplx` is the mean negative log-likelihood of a token in nats, `perplexity` its exponential. `bits_per_byte` does not
# depend on the tokenizer, so it compares models with different vocabularies. With `reset_for_eval=False` the evaluations
# of a training continue through the data; one of a checkpoint begins at its start, so its values differ from those above.

# %%
run.evaluate()

# %% [markdown]
# ## Every checkpoint

# %%
{step: round(run.evaluate(step)["stdlib"]["bits_per_byte"], 3) for step in run.steps}

# %% [markdown]
# ## Other text
#
# `files` evaluates all text of other files, read with the tokenizer of the run. After 60 steps the model knows little more
# than the frequencies of letters, which code and prose share.

# %%
pathlib.Path("code.py").write_text("def add(first, second):\n    return first + second\n" * 40)
pathlib.Path("prose.txt").write_text("It was the best of times, it was the worst of times. " * 40)
for name in ("code.py", "prose.txt"):
    print(name, round(run.evaluate(files=[name])["files"]["bits_per_byte"], 3))

# %% [markdown]
# ## Two models
#
# The same data and seed, one field changed: the curves of both, side by side.

# %%
other = pax.train(pax.load("tiny", set={**small, "num_layers": 2}), run_dir="runs/two-layers")
run.plot(other, metrics=["log_pplx"])
