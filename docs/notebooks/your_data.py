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
# # Your own data
#
# Train on your own text: plain files, JSON lines, Parquet, and token files; then with a tokenizer of your own.
# [Inputs](../inputs.md) has every format and setting.

# %%
import json
import pathlib

import pyarrow
import pyarrow.parquet

import paxcli as pax

small = {"num_layers": 1, "model_dims": 64, "hidden_dims": 128, "max_seq_len": 64, "global_batch_size": 4}
small |= {"num_heads": 2, "num_train_steps": 10, "summary_interval_steps": 5, "eval_inputs": []}

# %% [markdown]
# The same poem in three formats. A text file is one document; a line of JSON and a row of Parquet are one each.

# %%
lines = [f"{n} green bottles hanging on the wall, and if one green bottle should fall," for n in range(200, 0, -1)]
pathlib.Path("poem.txt").write_text("\n".join(lines))
pathlib.Path("poem.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
pyarrow.parquet.write_table(pyarrow.table({"text": lines}), "poem.parquet")

# %% [markdown]
# `train_input` becomes a `TextInput`, and `files` lists paths and globs. Look at the batches before training: how many
# documents share a row, and how much of it is padding.

# %%
for name in ("poem.txt", "poem.jsonl", "poem.parquet"):
    recipe = pax.load("tiny", set={**small, "train_input": "TextInput", "train_input.files": [name]})
    (found,) = pax.inspect_input(recipe).inputs
    batch = found.batches[0]
    print(f"{name:12} documents in row 0: {batch['segment_ids'][0].max()} · padding {found.padding_share:.0%}")

# %% [markdown]
# Packing decides how documents share rows. `first_fit` never splits a document that fits into a row, so rows have
# padding; `concat`, the default, fills them.

# %%
for packing in ("concat", "first_fit", "one_per_row"):
    data = {"train_input": "TextInput", "train_input.files": ["poem.jsonl"], "packing": packing, "max_seq_len": 128}
    (found,) = pax.inspect_input(pax.load("tiny", set={**small, **data})).inputs
    print(f"{packing:12} padding {found.padding_share:.0%}")

# %% [markdown]
# A tokenizer of your own: any `tokenizer.json` of Hugging Face. Here is one with 300 ids, trained on the poem.

# %%
import tokenizers

bpe = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
bpe.decoder = tokenizers.decoders.ByteLevel()
alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
)
bpe.train_from_iterator(lines, trainer)
bpe.save("tokenizer.json")

# %%
own = {
    "train_input": "TextInput",
    "train_input.files": ["poem.jsonl"],
    "train_input.tokenizer": "HuggingFaceTokenizer",
    "train_input.tokenizer.path": "tokenizer.json",
    "train_input.tokenizer.eos_token": "</s>",
    "model.vocab_size": 300,
}
recipe = pax.load("tiny", set={**small, **own})
(found,) = pax.inspect_input(recipe).inputs
print(found.batches[0]["ids"][0][:12], repr(found.rows[0][0]["ids"][0][:60]))

# %% [markdown]
# Train on it. The run keeps a copy of the tokenizer, so it can be moved.

# %%
run = pax.train(recipe, run_dir="runs/poem")
run.plot(metrics=["loss"])
