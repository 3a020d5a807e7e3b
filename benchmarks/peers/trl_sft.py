"""TRL's `SFTTrainer` on a Llama of Hugging Face transformers, with PEFT's LoRA where a rank is given."""

from __future__ import annotations

from hf_loop import llama, settings, step_of
from steps import serve

ROWS = 4096


def make_step(size: dict):
    """A step of the trainer."""
    import datasets
    import tokenizers
    import torch
    import transformers
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokens = torch.randint(0, size["vocab_size"], (ROWS, size["seq_len"])).tolist()
    rows = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    arguments = SFTConfig(
        **settings(size),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=size["seq_len"],
        learning_rate=2e-4,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    lora = LoraConfig(r=size["rank"] or 1, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return step_of(
        lambda callback: SFTTrainer(
            llama(size),
            arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora if size["rank"] else None,
            callbacks=[callback],
        )
    )


if __name__ == "__main__":
    serve(make_step)
