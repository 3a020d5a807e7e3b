"""Hugging Face's `Trainer` on its own model, as one writes it: SDPA attention, fused AdamW, bfloat16 where asked."""

from __future__ import annotations

import tempfile
import threading

from steps import serve


def make_step(size: dict):
    """A step of the trainer's own loop, which runs in a thread and waits for leave before each step."""
    import torch
    import transformers

    vocab, length, batch = size["vocab_size"], size["seq_len"], size["batch"]
    torch.manual_seed(0)
    if size.get("kind") == "llama":
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=size["model_dims"],
            intermediate_size=size["hidden_dims"],
            num_hidden_layers=size["num_layers"],
            num_attention_heads=size["num_heads"],
            num_key_value_heads=size.get("num_kv_heads") or size["num_heads"],
            max_position_embeddings=length,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=vocab,
            n_positions=length,
            n_embd=size["model_dims"],
            n_inner=size["hidden_dims"],
            n_layer=size["num_layers"],
            n_head=size["num_heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, _: int) -> dict:
            tokens = torch.randint(0, vocab, (length,))
            return {"input_ids": tokens, "labels": tokens}

    may_begin, is_done = threading.Semaphore(0), threading.Semaphore(0)

    class OnCommand(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            may_begin.acquire()

        def on_step_end(self, *_: object, **__: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            is_done.release()

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        max_steps=10**8,
        optim="adamw_torch_fused",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=size.get("dtype") == "bfloat16",
        gradient_checkpointing=bool(size.get("recompute")),
        torch_compile=bool(size.get("compile")),
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    sampler = torch.utils.data.SequentialSampler  # of so many rows, a random order would take minutes to draw
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[OnCommand()])
    trainer._get_train_sampler = lambda dataset=None: sampler(range(10**9))
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        may_begin.release()
        is_done.acquire()

    return step, lambda: None


if __name__ == "__main__":
    serve(make_step)
