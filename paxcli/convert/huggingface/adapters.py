"""LoRA and DoRA in the files of PEFT: merged into weights that are imported, and written from a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from paxcli.convert.huggingface.files import Safetensors, read_json, write_json
from paxcli.convert.huggingface.layouts import HEAD, TABLES, TEXT, modules_left_out, text_names
from paxcli.convert.layout import Layers, Layout, Rule
from paxcli.errors import ConfigError, DataError
from paxcli.layers.lora import AdaptedWeight, Lora

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_PART = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.(?:lora_(\w+)(?:\.weight)?|(weight|bias))")
_A, _B, _MAGNITUDE, _FULL = "A", "B", "magnitude_vector", ""
_MERGE = "Merge it into its base in Python: `peft_model.merge_and_unload().save_pretrained(DIR)`; import that."
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializers of adapters for a base of their own
_VARIANTS = ("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config")
_VARIANTS += ("lora_bias", "trainable_token_indices")
_INPUT_FIRST = re.compile(r"\.c_(attn|fc|proj)\.weight")  # GPT-2's matrices [inputs, outputs]


class MergedTensors:
    """The tensors of a model, with an adapter merged into each when it is read, in float32.

    The adapter is LoRA, with any ranks and scales, or DoRA. Tensors that it has in full, such as those of PEFT's
    `modules_to_save`, replace the model's.

    Attributes:
      shapes: Name → shape and dtype of each tensor.
    """

    def __init__(self, base: Safetensors, folder: Path, multimodal: bool):
        """Compares names and shapes.

        Args:
          base: The model's tensors.
          folder: Has `adapter_config.json` and `adapter_model.safetensors`.
          multimodal: Whether only the text decoder of the model is imported.

        Raises:
          ConfigError: The adapter is of another kind.
          DataError: A file is missing or damaged, or the adapter is of another model.
        """
        self._config, self._base, self._adapter = _lora_config(folder), base, Safetensors(folder)
        self._parts: dict[str, dict[str, str]] = {}  # of a tensor: part → name in the adapter
        known, shapes = text_names(base.shapes, multimodal), self._adapter.shapes
        left_out = modules_left_out(base.shapes, known)
        for saved in shapes:
            if not (found := _PART.fullmatch(saved)):
                raise DataError(f"`{saved}` in {folder} is not a part of LoRA or DoRA.", "Save the adapter with PEFT.")
            name, part = f"{found[1].replace(TEXT, '', 1)}.{found[3] or 'weight'}", found[2] or _FULL
            name = known.get(name) or known.get(name.removeprefix("transformer."), name)
            if not modules_left_out([name], {}) & left_out:
                self._parts.setdefault(name, {})[part.removeprefix("embedding_")] = saved
        # The output projection that a tied table was before the adapter changed one of them.
        table = next((known[name] for name in TABLES if name in known), HEAD)
        self._head = table if {table, HEAD} & self._parts.keys() and HEAD not in known else HEAD
        self.shapes = base.shapes | ({} if self._head == HEAD else {HEAD: base.shapes[table]})
        self.shapes |= {name: shapes[x[_FULL]] for name, x in self._parts.items() if _FULL in x}
        for name, parts in self._parts.items():
            a, b = (shapes[parts[part]].shape if part in parts else () for part in (_A, _B))
            shape = self.shapes[name].shape if name in self.shapes else None
            product = (*b[:1], *a[1:])[:: -1 if self._is_transposed(name) else 1]
            if parts.keys() != {_FULL} and (shape != product or parts.keys() - {_A, _B, _MAGNITUDE, _FULL}):
                problem = f"The adapter in {folder} does not fit `{name}`: its parts {sorted(parts)} make {product}"
                base_name = self._config.get("base_model_name_or_path")  # null if the base was in memory
                hint = f"Its base is {base_name}. {_MERGE}" if base_name else _MERGE
                raise DataError(f"{problem}, and the model has {shape or 'no such tensor'}.", hint)

    def __getitem__(self, name: str) -> np.ndarray:
        parts = {part: self._adapter[saved] for part, saved in self._parts.get(name, {}).items()}
        base = parts[_FULL] if _FULL in parts else self._base[self._head if name == HEAD else name]
        if _A not in parts:
            return base
        product = self._scale(name) * (parts[_B].astype(np.float32) @ parts[_A].astype(np.float32))
        inputs = 0 if self._is_transposed(name) else 1
        merged = base.astype(np.float32) + (product if inputs else product.T)
        if _MAGNITUDE in parts:
            magnitudes = np.expand_dims(parts[_MAGNITUDE].ravel(), inputs)
            merged *= magnitudes / np.linalg.norm(merged, axis=inputs, keepdims=True)
        return merged

    def _is_transposed(self, name: str) -> bool:
        # PEFT's `fan_in_fan_out` is the right one for its last module only, if there are several kinds.
        return bool(_INPUT_FIRST.search(name)) or ".lora_embedding_" in self._parts[name].get(_A, "")

    def _scale(self, name: str) -> float:
        a = self._parts[name][_A]
        module, rank = _PART.sub(r"\1", a), self._adapter.shapes[a].shape[0]
        alphas = self._config.get("alpha_pattern") or {}
        matching = (alpha for key, alpha in alphas.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = next(matching, self._config.get("lora_alpha", 8))
        return alpha / (rank**0.5 if self._config.get("use_rslora") else rank)


def _lora_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / ADAPTER_CONFIG)
    kind, init = config.get("peft_type"), str(config.get("init_lora_weights"))
    others = [name for name in _VARIANTS if config.get(name)] + [init] * init.startswith(_CHANGE_BASE)
    if kind != "LORA" or others:
        raise ConfigError(f"{folder} has an adapter that pax does not import: {(others or [kind])[0]}.", _MERGE)
    return config


def write_adapter(
    directory: Path, lora: Lora, layout: Layout, adapted: Mapping[str, AdaptedWeight], dtype: np.dtype
) -> list[str]:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT does; returns their names.

    Raises:
      ConfigError: Hugging Face stores an adapted weight with others in one tensor.
    """
    found = dict(_tensors(layout, adapted))
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True}
    content |= {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    content |= {"use_dora": lora.use_dora, "use_rslora": lora.use_rslora}
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
