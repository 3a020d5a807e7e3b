"""Reads and writes Hugging Face's safetensors files, one or several (sharded)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paxcli.errors import DataError, first_line
from paxcli.inputs.tokenizer_files import read_object

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 2 * 10**9
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
GGUF = ".gguf"


class Safetensors:
    """The tensors of a directory, memory-mapped and read one at a time.

    Raises:
      DataError: There are none; or a file is missing, damaged, or lacks a tensor of the index.
    """

    def __init__(self, directory: Path):
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, jax.ShapeDtypeStruct] = {}
        paths, indexed = _find(directory)
        for path in paths:
            self._open(path)
        if lacking := sorted(indexed - self.shapes.keys()):
            problem = f"{directory / INDEX} names `{lacking[0]}`, which no file has."
            raise DataError(problem, "Download the files again.")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
            slices = {name: file.get_slice(name) for name in list(file.keys())}
        except FileNotFoundError:
            raise DataError(f"{path} does not exist.", "Download the files again.") from None
        except (SafetensorError, OSError) as error:
            hint = "Download it again, and compare its size."
            raise DataError(f"{path} is damaged or incomplete: {first_line(error)}.", hint) from error
        for name, found in slices.items():
            if name in self.shapes:
                raise DataError(f"Two files have `{name}`, {path} among them.", "Delete files of another model.")
            if found.get_dtype() not in DTYPES:
                hint = "Import the weights that it was quantized from."
                raise DataError(f"`{name}` in {path} is {found.get_dtype()}; pax reads {', '.join(DTYPES)}.", hint)
            self._files[name] = file
            self.shapes[name] = jax.ShapeDtypeStruct(tuple(found.get_shape()), np.dtype(DTYPES[found.get_dtype()]))


def _find(directory: Path) -> tuple[list[Path], set[str]]:
    """The safetensors files, and the names of the tensors in their index, if there is one."""
    index = directory / INDEX
    if index.exists():
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise DataError(f"{index} has no `weight_map` of names to files.", "Download it again.")
        return [directory / Path(file).name for file in sorted(set(weights.values()))], set(weights)
    if found := sorted(directory.glob("*.safetensors")):
        return [path for path in found if path.name == SINGLE] or found, set()
    refuse_pickles(directory)
    raise DataError(f"{directory} has no safetensors file.", f"It needs {SINGLE}, or {INDEX} and its files.")


def refuse_pickles(source: Path) -> None:
    """Raises DataError if the weights are GGUF, or pickles, which could run any code when they are read."""
    candidates = sorted(source.iterdir()) if source.is_dir() else [source]
    files = [path for path in candidates if path.is_file()]
    if pickle := next((path for path in files if path.suffix in PICKLES), None):
        problem = f"{pickle} is a pickle, which can run any code when it is read, so pax does not read it."
        folder = pickle.parent
        call = f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')"
        raise DataError(problem, f"Convert it where you trust it: {call} in transformers writes safetensors.")
    if file := next((path for path in files if path.suffix == GGUF), None):
        raise DataError(f"{file} is a GGUF file, which pax does not read.", "Import the model's safetensors files.")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      DataError: It is missing, perhaps because the weights are pickles; it cannot be read; or it is not an object.
    """
    if not path.exists():
        refuse_pickles(path.parent)
        fault = f"{path.parent} has no {path.name}" if path.parent.is_dir() else f"There is no directory {path.parent}"
        raise DataError(f"{fault}.", "Give a directory of Hugging Face's format, not a file in it.")
    return read_object(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as `transformers` does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, np.ndarray]], sizes: Mapping[str, int], shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Writes `model.safetensors`, or shards and their index; holds one shard in memory.

    Args:
      directory: Where.
      tensors: Names and arrays.
      sizes: Bytes of each, in the same order.
      shard_bytes: The most bytes of a shard with several tensors.

    Returns:
      The names of the files.
    """
    shards: list[list[str]] = [[]]
    free = shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > free:
            shards.append([])
            free = shard_bytes
        shards[-1].append(name)
        free -= size
    count, rest = len(shards), iter(tensors)
    files = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for file, names in zip(files, shards, strict=True):
        arrays = {name: np.ascontiguousarray(x) for name, x in itertools.islice(rest, len(names))}
        assert list(arrays) == names
        save_file(arrays, directory / file, metadata={"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        files.append(INDEX)
    return files
