"""Makes `peft_lora.npz`, with PEFT, HF `transformers` 5 and PyTorch: `python tests/data/peft_lora.py`.

Adapters of the `llama31` of `hf_families.npz` and of the GPT-2 of `hf_gpt2.npz`, LoRA and DoRA, as PEFT saves them,
with every tensor moved off its initial value, and the logits with them.
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

HERE = pathlib.Path(__file__).parent
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALPHAS = {"k_proj": 3, "model.layers.0.mlp.up_proj": 12}
KINDS = {
    "lora": dict(target_modules=TARGETS),
    "dora": dict(target_modules=TARGETS, use_dora=True),
    "patterns": dict(
        target_modules=["q_proj", "k_proj", "up_proj", "embed_tokens"],
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 5},
        alpha_pattern=ALPHAS,
        use_rslora=True,
        modules_to_save=["lm_head"],
    ),
    "gpt2": dict(target_modules=["c_attn", "c_fc"], use_dora=True, fan_in_fan_out=True, bias="lora_only"),
}
"""Further fields of PEFT's `LoraConfig`."""


def base_model(kind: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """The base, and a row of ids."""
    if kind == "gpt2":
        sizes = dict(vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4, n_inner=80)
        model = GPT2LMHeadModel(GPT2Config(**sizes))
        file, family, prefix = "hf_gpt2.npz", "", "transformer."
    else:
        model = LlamaForCausalLM(hf_families.FAMILIES["llama31"])
        file, family, prefix = "hf_families.npz", "llama31/", ""
    with np.load(HERE / file) as arrays:
        base = {name.removeprefix(family): arrays[name] for name in arrays if name.startswith(family)}
    params = {
        name.replace("param/", prefix): torch.tensor(x).float() for name, x in base.items() if name.startswith("param/")
    }
    assert not model.load_state_dict(params, strict=False).unexpected_keys
    return model, torch.tensor(base["in/ids"][:1])


def adapter_arrays(kind: str) -> dict[str, np.ndarray]:
    """The saved tensors, adapter_config.json, and the logits of a row."""
    torch.manual_seed(0)
    model, ids = base_model(kind)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **KINDS[kind])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (kind == "gpt2" and parameter.requires_grad):
                parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
        logits = model(ids).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "adapter_model.safetensors")
        content = json.loads((pathlib.Path(folder) / "adapter_config.json").read_text())
    return {f"tensor/{name}": x for name, x in tensors.items()} | {
        "config": np.array(json.dumps(content)),
        "logits": logits.numpy(),
    }


if __name__ == "__main__":
    arrays = {f"{kind}/{name}": x for kind in KINDS for name, x in adapter_arrays(kind).items()}
    np.savez_compressed(pathlib.Path(__file__).with_suffix(".npz"), **arrays)
