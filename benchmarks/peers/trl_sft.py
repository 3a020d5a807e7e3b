"""TRL's `SFTTrainer` on a Llama of Hugging Face transformers, with PEFT's LoRA where a rank is given.

The task has the sizes; with `files`, conversations, the directory of their `tokenizer`, and whether it does `packing`.
"""

from __future__ import annotations

from typing import Any

from hf_loop import llama, settings, step_of
from steps import TokenCounter, serve

ROWS = 4096
_COUNTER = TokenCounter()


def make_step(size: dict):
    """A step of the trainer."""
    import torch
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    rows, tokenizer, reading = conversations(size) if "files" in size else full_rows(size)
    arguments = SFTConfig(
        **settings(size),
        **reading,
        max_length=size["seq_len"],
        learning_rate=2e-4,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    lora = LoraConfig(r=size["rank"] or 1, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")

    def make_trainer(callback: Any) -> SFTTrainer:
        trainer = SFTTrainer(
            llama(size),
            arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora if size["rank"] else None,
            callbacks=[callback],
        )
        collate = trainer.data_collator

        def count(examples: list[dict]) -> dict:
            _COUNTER.add(sum(len(one["input_ids"]) for one in examples))
            return collate(examples)

        trainer.data_collator = count
        return trainer

    return step_of(make_trainer)


def full_rows(size: dict):
    """Random rows of full length, a tokenizer, and the arguments of the trainer."""
    import datasets
    import tokenizers
    import torch
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokens = torch.randint(0, size["vocab_size"], (ROWS, size["seq_len"])).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    return rows, tokenizer, dict(dataset_kwargs={"skip_prepare_dataset": True})


def conversations(size: dict):
    """Conversations with the loss on the assistant's turns, their tokenizer, and the arguments of the trainer."""
    import datasets
    import transformers

    rows = datasets.load_dataset("json", data_files=size["files"], split="train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(size["tokenizer"])
    return rows, tokenizer, dict(assistant_only_loss=True, packing=size["packing"])


if __name__ == "__main__":
    serve(make_step, _COUNTER)
