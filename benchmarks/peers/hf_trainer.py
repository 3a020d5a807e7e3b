"""Hugging Face's `Trainer` on its own model, as one writes it: SDPA attention, fused AdamW, bfloat16 where asked."""

from __future__ import annotations

from hf_loop import llama, settings, step_of
from steps import serve

ROWS = 10**9


def make_step(size: dict):
    """A step of the trainer."""
    import torch
    import transformers

    torch.manual_seed(0)

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, _: int) -> dict:
            tokens = torch.randint(0, size["vocab_size"], (size["seq_len"],))
            return {"input_ids": tokens, "labels": tokens}

    arguments = transformers.TrainingArguments(
        **settings(size),
        learning_rate=1e-3,
        adam_beta2=0.95,
        bf16=size.get("dtype") == "bfloat16",
        gradient_checkpointing=bool(size.get("recompute")),
        torch_compile=bool(size.get("compile")),
        use_cpu=not torch.cuda.is_available(),
    )

    def make_trainer(callback: transformers.TrainerCallback) -> transformers.Trainer:
        model = llama(size) if size.get("kind") == "llama" else gpt2(size)
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback])
        sampler = torch.utils.data.SequentialSampler  # of so many rows, a random order would take minutes to draw
        trainer._get_train_sampler = lambda dataset=None: sampler(range(ROWS))
        return trainer

    return step_of(make_trainer)


def gpt2(size: dict):
    """A GPT-2 of transformers with random weights and SDPA attention."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size["vocab_size"],
        n_positions=size["seq_len"],
        n_embd=size["model_dims"],
        n_inner=size["hidden_dims"],
        n_layer=size["num_layers"],
        n_head=size["num_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


if __name__ == "__main__":
    serve(make_step)
