"""Makes `hf_gpt2.npz`, with HF `transformers` 5 and PyTorch: `python tests/data/hf_gpt2.py`.

A GPT-2 of random weights, moved off their initial values, on rows of random tokens; of the logits, those of each token.
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4, n_inner=80)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.randint(0, 61, (2, 20))
        logits = model(ids).logits
    arrays = {f"param/{name}": value.detach().numpy() for name, value in model.transformer.named_parameters()}
    np.savez_compressed(
        pathlib.Path(__file__).with_suffix(".npz"), **arrays, **{"in/ids": ids.numpy(), "out/logits": logits.numpy()}
    )
