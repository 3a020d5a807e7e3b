"""Shared by the peers that run a trainer of Hugging Face: the model, the settings, and a step of its loop."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

from steps import Step


def llama(size: dict) -> Any:
    """A Llama of transformers with random weights and SDPA attention."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["model_dims"],
        intermediate_size=size["hidden_dims"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        num_key_value_heads=size.get("num_kv_heads") or size["num_heads"],
        max_position_embeddings=size["seq_len"],
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def settings(size: dict) -> dict[str, Any]:
    """The arguments of any trainer: fused AdamW, clip 1.0, no logs and checkpoints."""
    return dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=size["batch"],
        max_steps=10**6,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def step_of(make_trainer: Callable[[Any], Any]) -> tuple[Step, Step]:
    """A step of a trainer's own loop, which runs in a thread and waits for leave before each step.

    Args:
      make_trainer: From a callback to a trainer that has it.
    """
    import torch
    import transformers

    may_begin, is_done = threading.Semaphore(0), threading.Semaphore(0)

    class OnCommand(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            may_begin.acquire()

        def on_step_end(self, *_: object, **__: object) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            is_done.release()

    threading.Thread(target=make_trainer(OnCommand()).train, daemon=True).start()

    def step() -> None:
        may_begin.release()
        is_done.acquire()

    return step, lambda: None
