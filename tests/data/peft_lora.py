"""Makes `peft_lora.npz`, with PEFT, HF `transformers` 5 and PyTorch: `python tests/data/peft_lora.py`.

Adapters of the `llama31` of `hf_families.npz`, LoRA and DoRA, as PEFT saves them, with every tensor moved off its
initial value, and the logits with them.
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import hf_families
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_arrays(base: dict[str, np.ndarray], use_dora: bool) -> dict[str, np.ndarray]:
    """The saved tensors, adapter_config.json, and the logits of a row."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(hf_families.FAMILIES["llama31"])
    params = {name.removeprefix("param/"): torch.tensor(x).float() for name, x in base.items() if "param/" in name}
    model.load_state_dict(params, strict=False)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, use_dora=use_dora, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
        logits = model(torch.tensor(base["in/ids"][:1])).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
        content = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
    return {f"tensor/{name}": x for name, x in tensors.items()} | {
        "config": np.array(json.dumps(content)),
        "logits": logits.numpy(),
    }


if __name__ == "__main__":
    with np.load(HERE / "hf_families.npz") as file:
        base = {name.removeprefix("llama31/"): file[name] for name in file if name.startswith("llama31/")}
    kinds = {"lora": False, "dora": True}
    arrays = {f"{kind}/{n}": x for kind, dora in kinds.items() for n, x in adapter_arrays(base, dora).items()}
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
