"""TRL's `SFTTrainer` on a Llama of Hugging Face transformers, with PEFT's LoRA where a rank is given."""

from __future__ import annotations

import tempfile
import threading

from steps import serve

ROWS = 4096


def make_step(size: dict):
    """A step of the trainer's own loop, which runs in a thread and waits for leave before each step."""
    import datasets
    import tokenizers
    import torch
    import transformers
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    vocab, length = size["vocab_size"], size["seq_len"]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=size["model_dims"],
        intermediate_size=size["hidden_dims"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        max_position_embeddings=length,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokens = torch.randint(0, vocab, (ROWS, length)).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    may_begin, is_done = threading.Semaphore(0), threading.Semaphore(0)

    class OnCommand(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            may_begin.acquire()

        def on_step_end(self, *_: object, **__: object) -> None:
            is_done.release()

    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=length,
        per_device_train_batch_size=size["batch"],
        max_steps=10**6,
        optim="adamw_torch_fused",
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    lora = LoraConfig(r=size["rank"] or 1, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora if size["rank"] else None,
        callbacks=[OnCommand()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        may_begin.release()
        is_done.acquire()

    return step, lambda: None


if __name__ == "__main__":
    serve(make_step)
