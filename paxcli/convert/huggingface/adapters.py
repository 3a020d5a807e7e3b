"""LoRA and DoRA of a run: merged into its weights, or as the files that PEFT reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from paxcli.convert.huggingface.files import write_json
from paxcli.convert.layout import Layers, Layout, Rule
from paxcli.errors import ConfigError
from paxcli.layers.lora import AdaptedWeight, Lora

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    directory: Path, lora: Lora, layout: Layout, adapted: Mapping[str, AdaptedWeight], dtype: np.dtype
) -> list[str]:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT does; returns their names.

    Raises:
      ConfigError: Hugging Face stores an adapted weight with others in one tensor.
    """
    found = dict(_tensors(layout, adapted))
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True}
    content |= {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "use_dora": lora.use_dora}
    content |= {"bias": "none", "target_modules": sorted({name.partition(".lora_")[0] for name in found})}
    tensors = {f"base_model.model.{name}": np.ascontiguousarray(x, dtype) for name, x in found.items()}
    save_file(tensors, directory / ADAPTER, metadata={"format": "pt"})
    write_json(directory / ADAPTER_CONFIG, content)
    return [ADAPTER_CONFIG, ADAPTER]


def _tensors(layout: Layout, adapted: Mapping[str, AdaptedWeight]) -> Iterator[tuple[str, np.ndarray]]:
    """PEFT's tensors without their prefix: A [rank, inputs], B [outputs, rank], and DoRA's magnitudes [outputs]."""
    for rule in layout.rules:
        pax, foreign = (layout.layers(rule.names(side)[0], side) for side in ("pax", "foreign"))
        for slot, foreign_slot in zip(pax.slots, foreign.slots, strict=True):
            names = [name.format_map(slot.fields) for name in rule.names("pax")]
            tensors = [name.format_map(foreign_slot.fields) for name in rule.names("foreign")]
            found = [adapted[name] for name in names if name in adapted]
            if found and len(names) + len(tensors) > 2:
                problem = f"PEFT's adapters do not fit `{tensors[0]}`: it is not one weight of pax, or not all of it."
                raise ConfigError(problem, "Export the merged weights: leave `--adapter` out.")
            for weight in found:
                yield from _of_layer(tensors[0].removesuffix("weight"), rule, weight, Layers((slot,), dims=pax.dims))


def _of_layer(module: str, rule: Rule, weight: AdaptedWeight, layer: Layers) -> Iterator[tuple[str, np.ndarray]]:
    magnitudes = weight.norm(weight.base) + (0 if weight.magnitude is None else weight.magnitude)
    parts = (weight.base, weight.a, weight.b, magnitudes)
    base, a, b, magnitude = (layer.read({"": np.asarray(x)}, "", [0])[0] for x in parts)

    def order(dims: Collection[int]) -> np.ndarray:
        """For each entry of Hugging Face's tensor along these dimensions, its number in pax."""
        sizes = [size if dim in dims else 1 for dim, size in enumerate(base.shape)]
        numbers = np.broadcast_to(np.arange(np.prod(sizes)).reshape(sizes), base.shape)
        matrix = rule.from_pax([numbers[None]])[0][0]
        return matrix[:, 0] if (matrix[0] == matrix[0, 0]).all() else matrix[0]

    inputs, outputs = order(weight.facts.contracts), order(weight.facts.produces)
    yield f"{module}lora_A.weight", a.reshape(-1, len(b)).T[:, inputs]
    yield f"{module}lora_B.weight", b.reshape(len(b), -1).T[outputs]
    if weight.magnitude is not None:
        yield f"{module}lora_magnitude_vector", magnitude.ravel()[outputs]
