"""Makes `hf_generate.json`, with HF `transformers` 5 and PyTorch: `python tests/data/hf_generate.py`.

Greedy continuations of prompts of unequal length by the `llama2` of `hf_families.npz`, in one batch for each repetition
penalty, and the log-probability of each token without the penalty; those of each prompt alone, without repeated
n-grams; and the beams of beam search with both, with their scores.
"""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
PENALTIES = (1.0, 1.3, 0.8)
PAD, NEW, BEAMS = 0, 24, 3
NGRAM_SIZES = (1, 2, 3)
OF_BEAMS = ((1.0, 0), (1.3, 0), (0.8, 0), (1.0, 2), (1.3, 3))  # repetition penalty, n-gram size

if __name__ == "__main__":
    here = pathlib.Path(__file__)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64, rms_norm_eps=1e-5)).eval()
    with np.load(here.with_name("hf_families.npz")) as file:
        prefix = "llama2/param/"
        state = {name.removeprefix(prefix): torch.tensor(file[name]) for name in file if name.startswith(prefix)}
    model.load_state_dict({name: value.float() for name, value in state.items()})
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(1, 61, length).tolist() for length in (1, 4, 9, 14)]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    outputs = {}
    for penalty in PENALTIES:
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            repetition_penalty=penalty,
            pad_token_id=PAD,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = found.sequences[:, width:]
        log_probs = torch.log_softmax(torch.stack(found.logits, dim=1), dim=-1)
        taken = torch.take_along_dim(log_probs, new[..., None], dim=-1)[..., 0]
        outputs[str(penalty)] = {
            "ids": new.tolist(),
            "log_probs": [[round(x, 6) for x in row] for row in taken.tolist()],
        }
    greedy = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=PAD, eos_token_id=None)
    ngrams: dict[int, list] = {size: [] for size in NGRAM_SIZES}
    for size, row in itertools.product(NGRAM_SIZES, prompts):
        found = model.generate(torch.tensor([row]), no_repeat_ngram_size=size, **greedy)
        ngrams[size].append(found[0, len(row) :].tolist())
    wide = dict(num_beams=BEAMS, num_return_sequences=BEAMS, length_penalty=0.0)
    beams = []
    for (penalty, size), row in itertools.product(OF_BEAMS, prompts):
        limits = dict(repetition_penalty=penalty, no_repeat_ngram_size=size)
        scored = dict(output_scores=True, return_dict_in_generate=True)
        found = model.generate(torch.tensor([row]), **limits, **wide, **scored, **greedy)
        ids, scores = found.sequences[:, len(row) :].tolist(), [round(x, 5) for x in found.sequences_scores.tolist()]
        beams.append({"penalty": penalty, "ngram_size": size, "prompt": row, "ids": ids, "scores": scores})
    content = {"prompts": prompts, "outputs": outputs, "ngrams": ngrams, "beams": beams}
    here.with_suffix(".json").write_text(json.dumps(content) + "\n")
